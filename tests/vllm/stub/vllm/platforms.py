# SPDX-License-Identifier: BSD-3-Clause
class CpuPlatform:
    device_type = "cpu"

    def is_cpu(self):
        return self.device_type == "cpu"


current_platform = CpuPlatform()
