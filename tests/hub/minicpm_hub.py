"""The 15 sources of the recipe `minicpm` on the fake hub, in their real layouts, filled with text of this machine.

Dumps, languages and sub-types are directories; files are of unequal sizes; `_SUCCESS` files, READMEs and columns that
nobody reads lie among them.
"""

from __future__ import annotations

import functools
import io
import random
import re
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from fake_hub import FakeHub

LANGUAGES = ("cpp", "cs", "go", "java", "js", "php", "py", "r", "rb", "rust", "sh")
SUBTYPES = ("Conversation-Synthetic", "Multi-Style-Synthetic", "QA-Synthetic", "Textbook-Exercise-Synthetic")
KINDS = ("UltraX-FineWeb", "UltraX-RedPajama-V2", "UltraX-AICC", "UltraX-Ultra-FineWeb", "UltraX-FineWeb-ProX-Doc")


@functools.cache
def paragraphs() -> list[str]:
    """Documents: blocks of the standard library's modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(root.glob("*.py")):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        texts += [block for block in re.split(r"\n\n+(?=\S)", text) if 40 < len(block) < 400]
    return texts


class _Maker:
    """Makes files of rows, no row twice."""

    def __init__(self, seed: int, scale: float) -> None:
        self._draw, self._scale = random.Random(seed), scale
        self._next = 0

    def rows(self, count: int) -> list[str]:
        """The next documents, made unlike any others by a first line."""
        texts = paragraphs()
        rows = []
        for _ in range(max(2, int(count * self._scale * self._draw.uniform(0.3, 1.7)))):
            rows.append(f"# {self._next}\n{texts[self._draw.randrange(len(texts))]}")
            self._next += 1
        return rows

    def parquet(self, text: str, count: int = 30, **others: object) -> bytes:
        """A file with a text column and others that repeat one value."""
        rows = self.rows(count)
        columns: dict[str, list[object]] = {"uid": [f"{self._next}-{i}" for i in range(len(rows))], text: list(rows)}
        columns |= {name: [value] * len(rows) for name, value in others.items()}
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out, compression="zstd", row_group_size=17)
        return out.getvalue()


def fill(hub: FakeHub, seed: int = 0, scale: float = 4.0) -> dict[str, str]:
    """Put the corpora on the hub; the commit of each repository."""
    return {repo: hub.add(repo, contents) for repo, contents in corpora(seed, scale).items()}


@functools.cache
def corpora(seed: int, scale: float) -> dict[str, dict[str, bytes]]:
    """The repositories' files; `scale` makes them larger."""
    make, files = _Maker(seed, scale), {}
    web: dict[str, bytes] = {"README.md": b"# Ultra-FineWeb\n" * 20, "assets/logo.png": b"\x89PNG" * 40}
    for dump in ("CC-MAIN-2019-35", "CC-MAIN-2024-10", "CC-MAIN-2025-30"):
        at = f"data/ultrafineweb_en_v1_4/{dump}"
        web[f"{at}/_SUCCESS"] = b""
        for part in range(1, 4):
            name = f"{at}/ultrafineweb-en-{dump}-part-{part:04d}-of-512.parquet"
            web[name] = make.parquet("content", 20, score=0.9, source="web", meta={"url": "u", "n": 1})
    for dump in ("CC-MAIN-2025-05", "CC-MAIN-2025-08"):
        web[f"data/ultrafineweb_l1_en_hq/{dump}/_SUCCESS"] = b""
        for part in range(3):
            web[f"data/ultrafineweb_l1_en_hq/{dump}/part-{part:05d}.parquet"] = make.parquet("content", 30)
    for part in range(1, 5):
        web[f"data/ultrafineweb_en/ultrafineweb-en-part-{part:04d}-of-2048.parquet"] = make.parquet(
            "content", score=0.5
        )
        web[f"data/ultrafineweb_zh/ultrafineweb-zh-part-{part:03d}-of-256.parquet"] = make.parquet("content", 40)
    files["openbmb/Ultra-FineWeb"] = web
    files["openbmb/Ultra-FineWeb-L1"] = {
        f"data/CC-MAIN-2025-{n}/part-{part}.parquet": make.parquet("content", 60) for n in (30, 51) for part in range(3)
    }
    files["openbmb/Ultra-FineWeb-L3"] = {
        f"data/ultrafineweb_{language}_l3/{kind}/{part:05d}.parquet": make.parquet("content", 30)
        for language in ("en", "zh") for kind in ("qa", "multi_style") for part in range(4)
    }  # fmt: skip
    files["openbmb/UltraX-Preview"] = {
        f"data/{kind}/{part:05d}.parquet": make.parquet("cleaned_content", 20, raw_content="<html>raw</html>" * 9)
        for kind in KINDS for part in range(2)
    }  # fmt: skip
    math = {
        f"data/UltraData-Math-L1/CC-MAIN-2024-{n}/UltraData-Math-L1-CC-MAIN-2024-{n}-part-{part:04d}-of-15.parquet":
        make.parquet("content", 30, meta='{"a": 1}') for n in (10, 18) for part in (1, 2)
    }  # fmt: skip
    math |= {f"data/UltraData-Math-L2-preview/part-{part}.parquet": make.parquet("content", 50) for part in range(4)}
    math |= {f"data/UltraData-Math-L3/{kind}/{p}.parquet": make.parquet("content") for kind in SUBTYPES for p in (0, 1)}
    files["openbmb/UltraData-Math"] = math
    files["openbmb/UltraData-Code"] = {
        f"data/UltraData-Code-{level}/{language}/UltraData-Code-{level}-{language}-part-{part:05d}-of-00006.parquet":
        make.parquet("content" if level == "L2" else "full_content", 30 if language == "py" else 10, repo_name="a/b")
        for level in ("L2", "L3") for language in LANGUAGES for part in (1, 2)
    }  # fmt: skip
    files["openbmb/UltraData-Stack-v3-L2"] = {
        f"data/{language}/{part:05d}.parquet": make.parquet("content", 30)
        for language in LANGUAGES[:4]
        for part in (0, 1)
    }
    files["openbmb/InfLLM-V2-data-5B"] = {
        f"train/data-{part:05d}-of-00020.parquet": make.parquet("text", 20 * (1 + part), token_ids=[1, 2, 3])
        for part in range(4)
    }
    for name in files:
        files[name].setdefault("README.md", b"# A data set\n" * 20)
    return files
