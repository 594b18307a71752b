"""Tests the shapes that rows come in: for each a good file, a broken one and an ambiguous one; and where files are."""

import csv
import datetime as dt
import json

import pytest

transformers = pytest.importorskip("transformers")

from support.small_folder import make_tokenizer, write_rows  # noqa: E402

from memascend.cli.train.data import (  # noqa: E402  # noqa: E402
    Batch,
    Encoder,
    Sequences,
    packed,
)
from memascend.cli.train.rows import (  # noqa: E402
    find_files,
    find_model,
    is_hub_name,
    read_rows,
)
from memascend.errors import ConfigError  # noqa: E402

BEGAN = dt.datetime(2025, 3, 4, tzinfo=dt.UTC)
ASKED, ANSWERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>"
SHARED = {"conversations": [{"from": "human", "value": "yes?"}, {"from": "gpt", "value": "no"}]}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
    ]
}
TURNS = {
    "prompt": [{"role": "user", "content": "yes?"}],
    "completion": [{"role": "assistant", "content": "no"}],
}
ALPACA = {"instruction": "yes?", "input": "", "output": "no"}


def encoded(*paths, columns=None, tokenizer=None):
    tokenizer = tokenizer or make_tokenizer()
    encoder = Encoder(tokenizer, 512, BEGAN)
    made = list(encoder.run(read_rows(*paths, columns=columns)))
    return [
        (
            tokenizer.decode(tokens.ids),
            tokenizer.decode([one for one, is_learnt in zip(tokens.ids, tokens.learnt, strict=True) if is_learnt]),
        )
        for tokens in made
    ], encoder


@pytest.mark.parametrize(
    ("row", "said"),
    [(SHARED, "`conversations` (ShareGPT)"), (PARTS, "`messages`"), (TURNS, "`prompt` and `completion`"),
     (ALPACA, "`instruction` and `output` (Alpaca)")],
    ids=["sharegpt", "parts", "turns", "alpaca"],
)  # fmt: skip
def test_a_conversation_is_learnt_whatever_its_shape(tmp_path, row, said):
    ((text, learnt),), counts = encoded(write_rows(tmp_path / "rows.jsonl", [row]))
    assert text == ASKED.format("yes?") + ANSWERED.format("no") + "\n"
    assert learnt == "no<|im_end|>"
    assert f"1 example of {said}: " in counts.said()


def test_alpaca_has_an_input_a_system_and_words_of_its_own(tmp_path):
    row = {**ALPACA, "input": "a test", "system": "It is.", "history": [["yes", "no"]]}
    ((text, learnt),), _ = encoded(write_rows(tmp_path / "rows.jsonl", [row]))
    assert text.startswith("<|im_start|>system\nIt is.<|im_end|>\n" + ASKED.format("yes"))
    assert ASKED.format("yes?\n\na test") in text
    # Every answer of the assistant, as of any conversation.
    assert learnt == "no<|im_end|>no<|im_end|>"
    plain = {"instruction": "yes?", "input": "a test", "output": "no"}
    ((text, learnt),), _ = encoded(write_rows(tmp_path / "rows.jsonl", [plain]), tokenizer=make_tokenizer(None))
    assert text.endswith("### Instruction:\nyes?\n\n### Input:\na test\n\n### Response:\nno<|im_end|>")
    assert learnt == "no<|im_end|>"


def test_turns_of_a_prompt_are_not_learnt(tmp_path):
    said = [{"role": "user", "content": "yes?"}, {"role": "assistant", "content": "yes"}]
    row = {"prompt": [*said, said[0]], "completion": [{"role": "assistant", "content": "no"}]}
    ((_, learnt),), _ = encoded(write_rows(tmp_path / "rows.jsonl", [row]))
    assert learnt == "no<|im_end|>"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "alien", "value": "a"}]}, "message 1 is from 'alien'"),
        ({"conversations": ["a"]}, "message 1 must be an object with `from` and `value`"),
        ({"conversations": []}, "`conversations` must be a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
        ({"instruction": 1, "output": "a"}, "`instruction` must be a text, not 1"),
        ({"instruction": "a", "output": ""}, "`output` must be a text that is not empty"),
        ({"instruction": "a", "output": "a", "history": ["a"]}, "`history` must be a list of pairs"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "a"}, "`completion` must be a list of messages"),
        ({"chosen": "a", "rejected": "b"}, "is a preference.* --columns messages=chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "is a preference.* --columns completion=chosen"),
    ],
)
def test_a_broken_row_is_named(tmp_path, row, said):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*" + said):
        encoded(write_rows(tmp_path / "rows.jsonl", [row]))


@pytest.mark.parametrize(
    ("row", "choice", "learnt"),
    [
        ({**ALPACA, "text": "It is a test."}, "text=text", "It is a test.<|im_end|>"),
        ({**ALPACA, "text": "It is a test."}, "instruction=instruction", "no<|im_end|>"),
        ({**SHARED, **PARTS}, "messages=messages", "no<|im_end|>"),
        ({"prompt": "a", "completion": "no", **SHARED}, "prompt=prompt", "no<|im_end|>"),
    ],
)
def test_an_ambiguous_row_is_refused_until_it_is_said_what_it_is(tmp_path, row, choice, learnt):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=f"fits several shapes, .* and .*--columns {choice}"):
        encoded(path)
    ((_, found),), _ = encoded(path, columns=choice)
    assert found == learnt


def test_columns_have_other_names(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "yes?", "answer": "no", "prompt": "another"}])
    (pair,), _ = encoded(path, columns="prompt=question,completion=answer")
    assert pair == ("yes?no<|im_end|>", "no<|im_end|>")
    with pytest.raises(ConfigError, match="--columns names 'reply', and this example has 'question'"):
        encoded(path, columns="prompt=question,completion=reply")
    with pytest.raises(ConfigError, match=r"--columns takes OURS=THEIRS.*'question'"):
        encoded(path, columns="question")
    with pytest.raises(ConfigError, match="name its columns by --columns"):
        encoded(path)


# --- files -----------------------------------------------------------------------------------------------------------


def test_an_array_of_json(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    for text in (json.dumps([ALPACA] * 3, indent=2), json.dumps([ALPACA] * 3), (json.dumps(ALPACA) + "\n") * 3):
        path.write_text(text)
        assert encoded(path)[1].rows == 3
    for text, said in (
        (json.dumps([ALPACA, ALPACA])[:-9], r"rows\.json: not valid JSON"),
        ("[1]", "example 1: an example must be a JSON object, not a int"),
        (json.dumps(ALPACA, indent=2), r"a \.json file must be an array of examples"),
        ("[]", "has no examples"),
        ('[{"text": "a"} {"text": "b"}]', "not valid JSON: Expecting ',' delimiter"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            encoded(path)
    monkeypatch.setattr("memascend.cli.train.rows._ARRAY_BYTES_MAX", 16)
    path.write_text(json.dumps([ALPACA]))
    with pytest.raises(ConfigError, match="write one example on each line"):
        encoded(path)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_tables_of_text(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        written = csv.writer(file, delimiter="," if suffix == "csv" else "\t")
        written.writerows([["instruction", "input", "output"], ["yes,\tyes?", "", "no\nno"], ["a", "b", "c"]])
    pairs, counts = encoded(path)
    assert pairs[0] == (ASKED.format("yes,\tyes?") + ANSWERED.format("no\nno") + "\n", "no\nno<|im_end|>")
    assert counts.rows == 2
    for line, said in (("a", "has no 'input'"), ("a\tb\tc\td".replace("\t", "," if suffix == "csv" else "\t"), "more")):
        path.write_text(path.read_text("utf-8-sig").splitlines()[0] + "\n" + line + "\n")
        with pytest.raises(ConfigError, match=rf"rows\.{suffix}:2: this row .*{said}"):
            encoded(path)


def test_several_files_patterns_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl"):
        write_rows(tmp_path / name, [{"text": name}])
    files, _ = find_files(["b.jsonl", "*.jsonl"])
    assert [path.name for path in files] == ["b.jsonl", "a.jsonl", "b.jsonl"]
    assert [path.name for path in find_files(["."])[0]] == ["a.jsonl", "b.jsonl"]
    for text, said in (
        ("*.csv", "no file matches"),
        ("c.jsonl", "does not exist"),
        ("nowhere/c.jsonl", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_files([text])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no file with examples"):
        find_files(["empty"])
    # One kind among them all.
    write_rows(tmp_path / "c.jsonl", [SHARED])
    with pytest.raises(ConfigError, match=r"c\.jsonl:1: this example is .*ShareGPT.*, and the ones before are `text`"):
        encoded(*find_files(["*.jsonl"])[0])
    (tmp_path / "d.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"files of several kinds \(\.csv, \.jsonl\): name one"):
        find_files(["."])


def test_a_folder_of_parquet_with_splits(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    names = ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]
    for name in names:
        parquet.write_table(arrow.Table.from_pylist([{"text": name}]), tmp_path / f"data/{name}.parquet")
    (tmp_path / "README.txt").write_text("about it")
    files, note = find_files([str(tmp_path)])
    assert [path.stem for path in files] == names[:2]
    assert f"the train split of {tmp_path}, without 1 of its 3 files" in note
    assert [path.stem for path in find_files([str(tmp_path)], held_out=True)[0]] == names[2:]
    assert encoded(*files)[1].rows == 2
    for name in names[:2]:
        (tmp_path / f"data/{name}.parquet").rename(tmp_path / f"data/dev-{name[6:]}.parquet")
    with pytest.raises(ConfigError, match=r"several splits \(dev, test\): name one"):
        find_files([str(tmp_path)])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache with one model and one data set, and no network."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    folders = {}
    for kind in ("models", "datasets"):
        repository = tmp_path / f"hub/{kind}--some--thing"
        folders[kind] = repository / "snapshots" / ("0" * 40)
        folders[kind].mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0" * 40)
    (folders["models"] / "config.json").write_text("{}")
    write_rows(folders["datasets"] / "train.jsonl", [{"text": "a"}])
    write_rows(folders["datasets"] / "test.jsonl", [{"text": "b"}])
    return folders


def test_names_on_the_hub(hub):
    assert find_model("some/thing") == hub["models"]
    assert [path.name for path in find_files(["some/thing"])[0]] == ["train.jsonl"]
    assert [path.name for path in find_files(["some/thing/*.jsonl"])[0]] == ["test.jsonl", "train.jsonl"]
    with pytest.raises(ConfigError, match="hf download --repo-type dataset other/thing --local-dir FOLDER"):
        find_files(["other/thing"])
    with pytest.raises(ConfigError, match="`hf download other/thing --local-dir FOLDER`"):
        find_model("other/thing")
    assert not is_hub_name("small/model.jsonl")
    assert not is_hub_name("/some/thing")


# --- packing ---------------------------------------------------------------------------------------------------------


def test_rows_are_packed_in_an_order_that_the_seed_decides(tmp_path):
    rows = [{"prompt": "yes " * (1 + number % 7), "completion": "no"} for number in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with Sequences(Encoder(make_tokenizer(), 64, BEGAN).run(read_rows(path)), tmp_path) as sequences:
        packs = packed(sequences, 32, 3)
        assert sorted(row for pack in packs for row in pack) == list(range(40))
        assert all(sum(map(sequences.length, pack)) <= 32 for pack in packs)
        assert len(packs) < 20
        assert packs == packed(sequences, 32, 3) != packed(sequences, 32, 4)
        batch = Batch.of_packs([[sequences[row] for row in pack] for pack in packs[:2]], 0)
        # As many tokens are learnt as of each row alone, and positions begin again with each row.
        alone = [Batch.of([sequences[row]], 0) for pack in packs[:2] for row in pack]
        assert batch.learnt == sum(one.learnt for one in alone)
        assert batch.tokens == sum(one.tokens for one in alone)
        starts = (batch.position_ids == 0) & (batch.attention_mask == 1)
        assert int(starts.sum()) == len(alone)
