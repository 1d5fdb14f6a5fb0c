# SPDX-License-Identifier: BSD-3-Clause
"""Families of models that are refused, and until which release of transformers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version


@dataclass(frozen=True)
class Refusal:
    """Families that are refused for one reason."""

    why: str  # in docs/models.md
    says: str  # a piece of the sentence that the user gets
    families: dict[str, Any]  # each a Family of hf_families
    until: str | None = None  # the release of transformers with which they work

    @property
    def applies(self) -> bool:
        """Whether they are refused with this release of transformers."""
        return self.until is None or Version(transformers.__version__) < Version(self.until)


def no_longer_refused(refusals: Iterable[Refusal]) -> dict[str, Any]:
    """The families that work with this release of transformers."""
    found = (refusal.families for refusal in refusals if not refusal.applies)
    return {name: family for families in found for name, family in families.items()}
