# SPDX-License-Identifier: BSD-3-Clause
"""The PTX instructions that the translator knows, and what each is in C++ (ptx_instructions.h)."""

# Their names in ptx_instructions.h, where b32 is u32 and so on.
CPP_TYPES = {
    "pred": "bool",
    **{f"{kind}{bits}": f"u{bits}" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"s{bits}" for bits in (8, 16, 32, 64)},
    "f32": "float",
}
BITS = {type: 1 if type == "pred" else int(type[1:]) for type in CPP_TYPES}

INTEGERS = "s16 s32 s64 u16 u32 u64 b16 b32 b64"
# Opcodes without their last part, the type: the types, and the result for operands of that type.
# Overflow of signed integers wraps (-fwrapv).
EXPRESSIONS = {
    "add": (INTEGERS, "{a} + {b}"),
    "sub": (INTEGERS, "{a} - {b}"),
    "mul.lo": (INTEGERS, "{a} * {b}"),
    "mul.hi": ("s32", "mul_hi({a}, {b})"),
    "mad.lo": (INTEGERS, "{a} * {b} + {c}"),
    "div": ("s32 s64 u32 u64", "div<{T}>({a}, {b})"),
    "rem": ("s32 s64 u32 u64", "rem<{T}>({a}, {b})"),
    "neg": ("s32 s64", "-{a}"),
    "and": (INTEGERS, "{a} & {b}"),
    "or": (INTEGERS, "{a} | {b}"),
    "xor": (INTEGERS, "{a} ^ {b}"),
    "not": (INTEGERS, "~{a}"),
    "bfi": ("b32 b64", "bfi<{T}>({a}, {b}, {c_u32}, {d_u32})"),
    "prmt": ("b32", "prmt({a}, {b}, {c})"),
    "shl": (INTEGERS, "shl<{T}>({a}, {b_u32})"),
    "shr": (INTEGERS, "shr<{T}>({a}, {b_u32})"),
    "mov": (f"{INTEGERS} f32 pred", "{a}"),
    "selp": (f"{INTEGERS} f32", "{c_pred} ? {a} : {b}"),
    "cvta.to.global": ("u64", "{a}"),
    "cvta.param": ("u64", "{a}"),
    "add.rn": ("f32", "{a} + {b}"),
    "sub.rn": ("f32", "{a} - {b}"),
    "mul.rn": ("f32", "{a} * {b}"),
    "div.rn": ("f32", "{a} / {b}"),
    "rcp.rn": ("f32", "1.0f / {a}"),
    "rcp.approx.ftz": ("f32", "rcp_ftz({a})"),
    "fma.rn": ("f32", "std::fma({a}, {b}, {c})"),
    "fma.rm": ("f32", "fma_rounded({a}, {b}, {c}, FE_DOWNWARD)"),
    "add.rz": ("f32", "add_rounded({a}, {b}, FE_TOWARDZERO)"),
    "copysign": ("f32", "std::copysign({b}, {a})"),
    "fma.rn.sat": ("f32", "fma_sat({a}, {b}, {c})"),
    "ex2.approx.ftz": ("f32", "ex2({a})"),
    "lg2.approx.ftz": ("f32", "lg2({a})"),
}
# Opcodes that the table above does not cover in whole: types of operands, of the result, and it.
WHOLE = {
    **{f"mul.wide.{t}": (f"{t} {t}", f"{t[0]}{2 * int(t[1:])}", "{T}({a}) * {b}")
       for t in ("s32", "u32", "u16")},
    **{f"{op}.{t}": (f"{t} {t}", t, f"{{a}} {sign} {{b}} ? {{a}} : {{b}}")
       for op, sign in (("min", "<"), ("max", ">")) for t in ("s32", "u32", "s64", "u64")},
    "min.f32": ("f32 f32", "f32", "min_f32({a}, {b})"),
    "max.f32": ("f32 f32", "f32", "max_f32({a}, {b})"),
    "abs.f32": ("f32", "f32", "std::fabs({a})"),
    "neg.f32": ("f32", "f32", "-{a}"),
    "and.pred": ("pred pred", "pred", "{a} && {b}"),
    "or.pred": ("pred pred", "pred", "{a} || {b}"),
    "xor.pred": ("pred pred", "pred", "{a} != {b}"),
    "not.pred": ("pred", "pred", "!{a}"),
    **{f"cvt.{to}.{of}": (of, to, "{a}")
       for to, of in (("s64", "s32"), ("u64", "u32"), ("u64", "u16"), ("u32", "u64"),
                      ("u32", "u16"), ("u16", "u32"))},
    **{f"cvt.rn.f32.{of}": (of, "f32", "float({a})") for of in ("s32", "s64")},
    **{f"cvt.rzi.{to}.f32": ("f32", to, "cvt_rzi<{T}>({a})") for to in ("s32", "s64")},
    "clz.b32": ("b32", "u32", "u32(std::countl_zero({a}))"),
    "cvt.sat.f32.f32": ("f32", "f32", "cvt_sat({a})"),
    "cvt.f32.f16": ("u16", "f32", "cvt_f32_f16({a})"),
    "cvt.rn.bf16x2.f32": ("f32 f32", "b32", "cvt_bf16x2({b}, {a})"),
    "cvt.rn.f16x2.f32": ("f32 f32", "b32", "cvt_f16x2({b}, {a})"),
    "cvt.rn.f16x2.e4m3x2": ("b16", "b32", "cvt_f16x2_e4m3x2({a})"),
    "add.rn.f16x2": ("b32 b32", "b32", "add_f16x2({a}, {b})"),
    "fma.rn.f16x2": ("b32 b32 b32", "b32", "fma_f16x2({a}, {b}, {c})"),
    "movmatrix.sync.aligned.m8n8.trans.b16": ("b32", "b32", "movmatrix_trans({a})"),
    "vote.sync.any.pred": ("pred b32", "pred", "__any_sync({b}, {a})"),
}  # fmt: skip
ORDERS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPPOSITES = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
SPECIAL_REGISTERS = {
    "%tid.x": "threadIdx.x",
    "%ntid.x": "blockDim.x",
    "%ctaid.x": "blockIdx.x",
    "%nctaid.x": "gridDim.x",
    "%globaltimer": "globaltimer()",
}
# Opcodes that are functions of ptx_host.h, ptx_hopper_host.h and emulator.h without a result. Of
# the operands those in brackets are addresses; the literal ones must be as here.
CALLS = {
    "cp.async.cg.shared.global.L2::128B": (
        ("[b32]", "[b64]", "16", "s32"),
        "cp_async_16({0}, reinterpret_cast<const void*>({1}), {3})",
    ),
    "cp.async.ca.shared.global": (
        ("[b32]", "[b64]", "4", "s32"),
        "cp_async_4({0}, reinterpret_cast<const void*>({1}), {3})",
    ),
    "griddepcontrol.wait": ((), "griddepcontrol_wait()"),
    "griddepcontrol.launch_dependents": ((), "griddepcontrol_launch_dependents()"),
    "cp.async.commit_group": ((), "cp_async_commit_group()"),
    "cp.async.wait_group": (("u32",), "cp_async_wait_group<{0}>()"),
    "bar.sync": (("0",), "__syncthreads()"),
    "barrier.cta.sync.aligned": (("u32", "u32"), "bar_sync({0}, {1})"),
    "bar.warp.sync": (("b32",), "__syncwarp({0})"),
    # In the kernels the wait follows at once.
    "barrier.cluster.arrive.release.aligned": ((), ""),
    "barrier.cluster.wait.acquire.aligned": ((), "barrier_cluster()"),
    "st.release.sys.global.u64": (
        ("[b64]", "u64"),
        "store_release_system(reinterpret_cast<uint64_t*>({0}), {1})",
    ),
    "mbarrier.init.shared::cta.b64": (("[b32]", "u32"), "mbarrier_init({0}, {1})"),
    "mbarrier.arrive.shared::cta.b64": (("_", "[b32]"), "mbarrier_arrive({1})"),
    "mbarrier.arrive.expect_tx.shared::cta.b64": (
        ("_", "[b32]", "u32"),
        "mbarrier_arrive_expect_tx({1}, {2})",
    ),
    "fence.mbarrier_init.release.cluster": ((), "fence_mbarrier_init()"),
    "fence.proxy.async.shared::cta": ((), "fence_proxy_async()"),
    "wgmma.fence.sync.aligned": ((), "wgmma_fence()"),
    "wgmma.commit_group.sync.aligned": ((), "wgmma_commit_group()"),
    "wgmma.wait_group.sync.aligned": (("u32",), "wgmma_wait_group<{0}>()"),
    "trap": ((), 'fail("trap", source_location::current())'),
    "ret": ((), "return"),
}
# The same with a result of this type, the first operand.
CALLS_WITH_RESULT = {
    "atom.acq_rel.gpu.global.inc.u32": (
        "u32", ("[b64]", "u32"), "atomic_inc_acq_rel(reinterpret_cast<uint32_t*>({0}), {1})",
    ),
    "barrier.cta.red.or.aligned.pred": (
        "pred", ("u32", "u32", "pred"), "bar_red_or({0}, {1}, {2})",
    ),
    "mbarrier.try_wait.parity.shared::cta.b64": (
        "pred", ("[b32]", "u32"), "mbarrier_try_wait_parity({0}, {1})",
    ),
    "mapa.shared::cluster.u32": ("u32", ("b32", "b32"), "mapa({0}, {1})"),
    "ld.acquire.gpu.global.u32": (
        "u32", ("[b64]",), "load_acquire(reinterpret_cast<const uint32_t*>({0}))",
    ),
    "ld.acquire.sys.global.u64": (
        "u64", ("[b64]",), "load_acquire_system(reinterpret_cast<const uint64_t*>({0}))",
    ),
}  # fmt: skip
SHUFFLES = {"up": "kUp", "bfly": "kXor", "idx": "kIndex"}
LDMATRIX = {
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "ldmatrix_x4",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "ldmatrix_x4_trans",
}
MMA = {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32": f"mma_m16n8k16_{type}"
    for type in ("bf16", "f16")
}
BOX_COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2"
