"""A profile: times by kernel and by operator, what is idle, and that every kernel of ours has an operator."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import neuronspark
from nstrain.train.model import kernel_operators
from nstrain.train.profile import IDLE, TRAINER_KERNELS, UNKNOWN, library_operator, short_name, summarize

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "benchmarks" / "models"

Place = tuple[Path, str]
"""A function: its file and its name."""


# --- the kernels there are -----------------------------------------------------------------------------------


def is_jit(function: ast.stmt) -> bool:
    """Whether a function is Triton's."""
    return isinstance(function, ast.FunctionDef) and any(
        ast.unparse(decorator).partition("(")[0] in ("triton.jit", "jit") for decorator in function.decorator_list
    )


def imported_names(tree: ast.Module) -> Iterator[tuple[str, Place]]:
    """Names that a file imports from our packages' files: the name here, and what it is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = Path(*node.module.split(".")).with_suffix(".py")
            for root in (ROOT, BASELINES):
                if (root / path).exists():
                    yield from ((name.asname or name.name, (root / path, name.name)) for name in node.names)


def kernels_in(directory: Path) -> list[str]:
    """Names of the Triton functions that no other one calls: those that are launched."""
    functions: set[Place] = set()
    called: set[Place] = set()
    for path in sorted(directory.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = dict(imported_names(tree))
        for function in filter(is_jit, tree.body):
            assert isinstance(function, ast.FunctionDef)
            functions.add((path, function.name))
            names[function.name] = path, function.name
        for function in filter(is_jit, tree.body):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            called |= {names[call.id] for call in calls if isinstance(call, ast.Name) and call.id in names}
    return sorted(name for _, name in functions - called)


@pytest.mark.parametrize(
    ("directory", "operators"),
    [(ROOT / "neuronspark", neuronspark.KERNEL_OPERATORS), (ROOT / "nstrain", TRAINER_KERNELS)],
    ids=["model", "trainer"],
)
def test_every_kernel_has_an_operator(directory: Path, operators: dict[str, str]) -> None:
    kernels = kernels_in(directory)
    assert kernels, "Triton's functions were not found"
    assert len(kernels) == len(set(kernels)), "two kernels of one name cannot be told apart in a profile"
    assert kernels == sorted(operators), "and the tables name no kernel that is gone"


def test_every_kernel_of_the_baselines_has_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BASELINES)])
    import baselines

    own = set(baselines.KERNEL_OPERATORS) - set(neuronspark.KERNEL_OPERATORS)
    assert kernels_in(BASELINES) == sorted(own)


def test_the_trainer_finds_the_models_table() -> None:
    assert kernel_operators()["_addresses_forward_kernel"] == "addresses"
    assert not set(kernel_operators()) & set(TRAINER_KERNELS)


# --- libraries' kernels --------------------------------------------------------------------------------------

ADDITION = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
CONCATENATION = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, 3>(int)"
REDUCTION = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>, 4> >(P)"
PRODUCT = "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT"


@pytest.mark.parametrize(
    ("name", "operator", "short"),
    [
        (PRODUCT, "matrix products", "matrix products (cuBLAS)"),
        ("void cutlass::Kernel2<cutlass_80_wmma>(int)", "matrix products", "matrix products (cuBLAS)"),
        (ADDITION, "copies and additions", "torch vectorized_elementwise_kernel CUDAFunctor_add"),
        (CONCATENATION, "copies and additions", "torch CatArrayBatchedCopy"),
        ("Memcpy DtoH (Device -> Pinned)", "copies and additions", "Memcpy DtoH"),
        ("void pytorch_flash::flash_fwd_kernel<T>(P)", "attention", "pytorch_flash::flash_fwd_kernel"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<P>(int)", "sorts", None),
        ("memcpy128", "copies and additions", "memcpy128"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "matrix products", "cublasLt::splitKreduce_kernel"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", "gathers", "torch vectorized_gather_kernel"),
        (REDUCTION, "other elementwise and sums", "torch reduce_kernel sum_functor"),
        ("some_kernel_of_another_package", UNKNOWN, "some_kernel_of_another_package"),
    ],
)
def test_kernels_of_libraries(name: str, operator: str, short: str | None) -> None:
    assert library_operator(name) == operator
    assert short is None or short_name(name) == short


# --- the sums ------------------------------------------------------------------------------------------------


def test_kernels_add_up_to_operators_and_the_update() -> None:
    intervals = [
        ("forward_kernel", 1000.0, 3000.0),
        ("key_gradient_kernel", 3000.0, 4000.0),
        (PRODUCT, 5000.0, 9000.0),
        (PRODUCT.replace("NNT", "TNT"), 9000.0, 10_000.0),
        ("_adamw_kernel", 10_500.0, 11_000.0),
    ]
    found = summarize(intervals[::-1], {**neuronspark.KERNEL_OPERATORS, **TRAINER_KERNELS})
    assert found.span_ms == 10.0
    assert found.idle_share == pytest.approx(0.15)
    assert [(o.operator, o.ms, o.calls) for o in found.operators] == [
        ("matrix products", 5.0, 2),
        ("pool read", 3.0, 2),
        ("AdamW", 0.5, 1),
        (IDLE, 1.5, 0),
    ]
    assert sum(o.ms for o in found.operators) == pytest.approx(found.span_ms)
    assert sum(o.share for o in found.operators) == pytest.approx(1)
    assert [(k.name, k.operator, k.calls) for k in found.kernels] == [
        ("matrix products (cuBLAS)", "matrix products", 2),
        ("forward_kernel", "pool read", 1),
        ("key_gradient_kernel", "pool read", 1),
        ("_adamw_kernel", "AdamW", 1),
    ]


def test_time_in_which_kernels_overlap_is_busy_once() -> None:
    found = summarize([("a", 0.0, 6.0), ("b", 2.0, 4.0), ("c", 5.0, 8.0), ("d", 9.0, 10.0)], {})
    assert found.idle_share == pytest.approx(0.1)
    assert found.operators[0].operator == UNKNOWN
    assert found.operators[0].ms == pytest.approx(0.012)
