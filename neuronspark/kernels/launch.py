"""Launch configurations of the Triton kernels: pinned by kernel, shape and card, never tuned at random at a start.

A configuration decides the order of a kernel's sums, and so the bits of a run. Each kernel's module registers its own
under a name that says kernel and shape class ("pool_read_forward/64+32"), one for every card that was measured and one
for "any" other. A trainer saves `used_table()` with a line, and gives it back to `use_saved` when the line goes on, so
that a later choice of tiles changes no run under way. A table that does not fit the kernels here is refused by name.

`compile_case` compiles a kernel for a card that need not be here, and reads what it takes of the card.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ANY = "any"
"""The card's name in the table for every card without an entry of its own, and for the interpreter."""
CARDS = ("sm_90", "sm_100", "sm_103")
"""Cards that every pinned configuration is compiled for: Hopper, Blackwell, Blackwell Ultra."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    blocks: Mapping[str, int]
    """Its tile sizes, by the names of the kernel's compile-time arguments."""
    num_warps: int
    """Warps of 32 threads a program."""
    num_stages: int = 1
    """Depth of the software pipeline of its loops."""
    max_registers: int | None = None
    """The most registers a thread may have; more programs share a multiprocessor, and what does not fit spills."""

    def compiler_options(self) -> dict[str, int]:
        """What the compiler is told beside the kernel's arguments."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def options(self) -> dict[str, int]:
        """Everything as keyword arguments of a launch."""
        return {**self.blocks, **self.compiler_options()}


class UnfitTable(ValueError):
    """A table of launch configurations that these kernels cannot run with; the message names the kernel."""


_registered: dict[str, dict[str, Launch]] = {}
_spills: dict[tuple[str, str], int] = {}
_in_use: dict[str, dict[str, Launch]] = {}
_launched: set[str] = set()


def register(name: str, launches: Mapping[str, Launch]) -> str:
    """Pin the configurations of one kernel and shape class, by card; `ANY` must be among them. Returns the name."""
    if ANY not in launches:
        raise ValueError(f"{name}: no launch configuration for {ANY!r}")
    _registered[name] = dict(launches)
    return name


def allow_spill(name: str, card: str, spilled_bytes: int) -> None:
    """Say that a pinned configuration was measured fastest although a thread spills up to so many bytes on a card."""
    _spills[name, card] = spilled_bytes


def allowed_spill(name: str, card: str) -> int:
    """Bytes that a thread of the pinned configuration may spill on a card: 0 but for what `allow_spill` says."""
    return _spills.get((name, card), 0)


def pinned(name: str, device: torch.device) -> Launch:
    """The configuration of a registered kernel on a device: the line's own if `use` was told of it, else the pinned."""
    _launched.add(name)
    card, own, common = card_of(device), _in_use.get(name, {}), _registered[name]
    return own.get(card) or own.get(ANY) or common.get(card) or common[ANY]


@functools.cache
def card_of(device: torch.device) -> str:
    """A device's name in the table: "sm_90" for a Hopper GPU, ..., `ANY` for a CPU."""
    if device.type != "cuda":
        return ANY
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def used_table() -> dict[str, Any]:
    """What of `table()` this process has launched or was told to `use`: a kernel that a run has no use for may go."""
    return {name: launches for name, launches in table().items() if name in _launched or name in _in_use}


def table() -> dict[str, Any]:
    """What every registered kernel runs with, by kernel and card, as JSON-serialisable values."""
    return {
        name: {card: dataclasses.asdict(launch) for card, launch in sorted(launches.items())}
        for name, launches in sorted({**_registered, **_in_use}.items())
    }


def use(saved: Mapping[str, Any]) -> None:
    """Use the configurations of an earlier `table()`; kernels and cards that it does not name keep their pinned ones.

    Raises `UnfitTable`, and goes on with what was in use, for a kernel that is not registered, for fields that are not
    a `Launch`'s, and for tile sizes of other names than the kernel's.
    """
    if not isinstance(saved, Mapping):
        raise UnfitTable(f"expected launch configurations by kernel, found {saved!r}")
    checked = {name: _fitting(name, launches) for name, launches in saved.items()}
    _in_use.clear()
    _in_use.update(checked)


def use_saved(saved: Mapping[str, Any], packages: Sequence[str] = ("neuronspark.kernels",)) -> None:
    """`use` for a table that another version may have saved: whatever `packages` have is registered before.

    A kernel is registered when its module (NAME_triton) is imported, which else happens where it first runs. Without
    Triton there is no kernel to compare with, nor one that runs: then the table is kept as it is for `table()`.
    """
    for package in packages if importlib.util.find_spec("triton") else ():
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if "_triton" in module.name:
                importlib.import_module(f"{package}.{module.name}")
    use(saved)


def _fitting(name: str, launches: Any) -> dict[str, Launch]:
    """One kernel's configurations by card. Raises `UnfitTable`."""
    if _registered and name not in _registered:
        near = difflib.get_close_matches(name, _registered, n=1, cutoff=0.0)[0]
        raise UnfitTable(f"kernel {name!r}: expected one of the {len(_registered)} here, the nearest is {near!r}")
    if not isinstance(launches, Mapping):
        raise UnfitTable(f"kernel {name!r}: expected configurations by card, found {launches!r}")
    return {card: _fitting_launch(name, card, fields) for card, fields in launches.items()}


def _fitting_launch(name: str, card: str, fields: Any) -> Launch:
    """One configuration. Raises `UnfitTable`."""
    place = f"kernel {name!r}, card {card!r}"
    optional = {field.name for field in dataclasses.fields(Launch) if field.default is not dataclasses.MISSING}
    needed = {field.name for field in dataclasses.fields(Launch)} - optional
    if not isinstance(fields, Mapping) or not needed <= set(fields) <= needed | optional:
        found = _listed(fields) if isinstance(fields, Mapping) else repr(fields)
        raise UnfitTable(f"{place}: expected the fields {_listed(needed)} (and {_listed(optional)}), found {found}")
    blocks = fields["blocks"]
    if not isinstance(blocks, Mapping):
        raise UnfitTable(f"{place}: expected blocks as tile sizes by name, found {blocks!r}")
    if name in _registered and set(blocks) != set(_registered[name][ANY].blocks):
        expected = _listed(_registered[name][ANY].blocks)
        raise UnfitTable(f"{place}: expected the blocks {expected}, found {_listed(blocks)}")
    for field, value in {**fields, **blocks}.items():
        is_size = type(value) is int and value > 0
        if not (is_size or field == "blocks" or (field == "max_registers" and value is None)):
            raise UnfitTable(f"{place}: expected a whole number above 0 as {field}, found {value!r}")
    return Launch(**fields)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- compiling for a card that is not here -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """A kernel with the types and compile-time arguments that one use of it has."""

    name: str
    """The registered name of its launch configurations."""
    kernel: Any
    """The function under triton.jit."""
    types: Mapping[str, str | int]
    """Every run-time argument's type as Triton writes it: "*bf16", "*fp32", "i32", "fp32", ...; or, for an integer,
    its value in a launch: a 1 and multiples of 16 are compiled apart, unless the kernel says do_not_specialize."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Compile-time arguments beside the launch's blocks."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a multiprocessor."""

    registers: int
    """A thread."""
    spilled_bytes: int
    """A thread's local memory: registers that did not fit, in bytes."""
    shared_bytes: int
    """A program's shared memory."""


def compile_case(case: CompileCase, card: str, launch: Launch | None = None) -> Resources:
    """Compile for a card ("sm_90") with its pinned configuration, or a given one; needs no GPU.

    Must run without TRITON_INTERPRET. A compiler's abort ends the process: use a child for cases not tried before.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launches = _registered[case.name]
    chosen = launch or launches.get(card) or launches[ANY]
    constants = {**case.constants, **chosen.blocks}
    signature, attributes = {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        kind = case.types.get(name, "constexpr")
        if not isinstance(kind, str) and case.kernel.params[index].do_not_specialize:
            kind = "i32"
        if kind == 1:
            constants[name] = 1
        if kind[0] == "*" if isinstance(kind, str) else kind % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind if isinstance(kind, str) else "constexpr" if kind == 1 else "i32"
    source = ASTSource(
        case.kernel, signature, {name: constants[name] for name, t in signature.items() if t == "constexpr"}, attributes
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", int(card.removeprefix("sm_")), 32), options=chosen.compiler_options()
    )
    registers, spilled = _resource_usage(compiled.asm["cubin"])
    return Resources(registers, spilled, compiled.metadata.shared)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread, as cuobjdump reads them from the machine code."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]
