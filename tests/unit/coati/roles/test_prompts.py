"""Prompts of a CSV file: what is read, what is refused in one sentence, and in which order rows come."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.coati.roles.prompts import encode, next_rows, read_prompts
from rlhf_core.data.problems import problem_key
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer

TABLE = 'id,prompt\n1,Say it\n2,"Commas, and\nlines"\n'


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.endswith("cut.csv"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"id")
        return None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_table_is_read_from_a_path_and_from_an_address(tmp_path: Path, site: str) -> None:
    (tmp_path / "p.csv").write_text(TABLE)
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    expected = ["Say it", "Commas, and\nlines"]
    for place in (tmp_path / "p.csv", tmp_path / "p.csv.gz", f"file://{tmp_path}/p.csv", f"{site}/p.csv"):
        assert read_prompts(str(place)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("id,question\n1,Why?\n", r"has no column 'prompt', but 'id', 'question'; write 'prompt' in the first line"),
        ("id,prompt\n", "holds the names of columns and no row"),
        ("", "is empty; it should hold a line that names the columns"),
        ("id,prompt\n1,\n", "line 2 of .* has an empty prompt; write one, or take the line out"),
        ("id,prompt\n1,a,b\n", "line 2 of .* has 3 fields, but the first line names 2 columns"),
    ],
)
def test_a_table_without_prompts_is_refused_in_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(DataError, match=complaint) as refused:
        read_prompts(str(tmp_path / "p.csv"))
    assert len(str(refused.value).splitlines()) == 1


def test_a_place_where_nothing_is_is_named(tmp_path: Path, site: str) -> None:
    (tmp_path / "prompts.csv").write_text(TABLE)
    with pytest.raises(DataError, match=r"does not exist; did you mean .*prompts\.csv"):
        read_prompts(str(tmp_path / "prompt.csv"))
    with pytest.raises(DataError, match=r"none\.csv cannot be fetched: (Not Found|File not found); check"):
        read_prompts(f"{site}/none.csv")
    with pytest.raises(DataError, match=r"a b\.csv cannot be fetched: URL can't contain control characters"):
        read_prompts(f"{site}/a b.csv")
    with pytest.raises(
        DataError, match=r"cut\.csv cannot be fetched: IncompleteRead\(2 bytes read, 98 more expected\)"
    ):
        read_prompts(f"{site}/cut.csv")
    with pytest.raises(DataError, match=r"ftp://there/p\.csv is of a kind that is not read"):
        read_prompts("ftp://there/p.csv")


def test_prompts_are_the_text_as_it_stands_and_lose_what_is_too_long() -> None:
    found = encode(["ab", "abcdef"], tiny_tokenizer(), max_tokens=4)
    assert found.cut == 1
    assert [prompt.ids for prompt in found.prompts] == [
        tuple(tiny_tokenizer()(text).input_ids) for text in ("ab", "abcd")
    ]
    assert [prompt.key for prompt in found.prompts] == [problem_key("ab"), problem_key("abcdef")]
    with pytest.raises(DataError, match="has no token"):
        encode([""], tiny_tokenizer(), max_tokens=4)


def test_every_row_comes_before_one_comes_again_whoever_asks_for_how_many() -> None:
    rows, batch, ranks = 7, 2, 3
    given = []
    for step in range(14):
        for rank in range(ranks):
            given += next_rows((step * ranks + rank) * batch, batch, rows=rows, seed=5)
    for start in range(0, len(given), rows):
        assert sorted(given[start : start + rows]) == list(range(rows))
    assert set(Counter(given).values()) == {12}
    assert given[:rows] == np.random.default_rng([5, 0]).permutation(rows).tolist()
    assert given[:rows] != given[rows : 2 * rows]
    assert next_rows(0, 30, rows=2, seed=5)[:4] in ([0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0])
