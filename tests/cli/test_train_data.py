"""Tests how `memascend train` reads rows: what is learnt, what is cut, and what is said of a bad line."""

import contextlib
import datetime as dt

import pytest

transformers = pytest.importorskip("transformers")

from support.small_folder import CHATML, GENERATION, make_tokenizer, write_rows  # noqa: E402

from memascend.cli.train.data import (  # noqa: E402  # noqa: E402
    Batches,
    Encoder,
    Sequences,
    alone,
)
from memascend.cli.train.loop import Rate  # noqa: E402
from memascend.cli.train.rows import read_rows  # noqa: E402
from memascend.errors import ConfigError  # noqa: E402

BEGAN = dt.datetime(2025, 3, 4, tzinfo=dt.UTC)
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "It is a test."},
    {"role": "user", "content": "Yes?"},
    {"role": "assistant", "content": "Yes, yes."},
]
# As Llama 3 has it: contents are trimmed, and the day is told.
HEADERS = (
    "{{ '<|endoftext|>' }}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
# As models that reason have it: only the last answer keeps its thoughts, and gets empty ones where it has none.
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}{{ m['content'] if '</think>' in m['content'] else '<think>\\n\\n</think>\\n\\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# No generation prompt, no special token at a turn's end but the last, as older templates.
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ eos_token }}"


def encoded(tmp_path, rows, tokenizer=None, max_length=512, name="rows.jsonl"):
    path = write_rows(tmp_path / name, rows)
    encoder = Encoder(tokenizer or make_tokenizer(), max_length, BEGAN)
    return list(encoder.run(read_rows(path))), encoder


def learnt(tokenizer, tokens):
    """The runs of text that are learnt."""
    runs, run = [], []
    for one, is_learnt in zip([*tokens.ids, None], [*tokens.learnt, False], strict=True):
        if is_learnt:
            run.append(one)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["It is a test.<|im_end|>", "Yes, yes.<|im_end|>"]),
        (GENERATION, ["It is a test.<|im_end|>", "Yes, yes.<|im_end|>"]),
        (HEADERS, ["It is a test.<|im_end|>", "Yes, yes.<|im_end|>"]),
        (THINKS, ["It is a test.<|im_end|>", "<think>\n\n</think>\n\nYes, yes.<|im_end|>"]),
    ],
    ids=["chatml", "generation", "headers", "thinks"],
)
@pytest.mark.parametrize("trim_offsets", [True, False])
def test_the_assistants_words_are_learnt(tmp_path, template, expected, trim_offsets):
    tokenizer = make_tokenizer(template, trim_offsets=trim_offsets)
    (tokens,), counts = encoded(tmp_path, [{"messages": TURNS}], tokenizer)
    assert learnt(tokenizer, tokens) == expected
    # What the model is given is what the template makes, token by token.
    if template != HEADERS:
        whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
        assert tokens.ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert counts.learnt == sum(tokens.learnt)


def test_reasoning_is_learnt_where_the_template_keeps_it(tmp_path):
    tokenizer = make_tokenizer(THINKS)
    turns = [*TURNS[:2], {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is."}, *TURNS[3:]]
    (tokens,), _ = encoded(tmp_path, [{"messages": turns}], tokenizer)
    assert learnt(tokenizer, tokens) == ["It is.<|im_end|>", "<think>\n\n</think>\n\nYes, yes.<|im_end|>"]
    (tokens,), _ = encoded(tmp_path, [{"messages": turns[:3]}], tokenizer)
    assert learnt(tokenizer, tokens) == ["<think>\nso\n</think>\n\nIt is.<|im_end|>"]


def test_an_answer_that_repeats_the_question_is_found(tmp_path):
    """By its place, and not by its words."""
    tokenizer = make_tokenizer(THINKS)
    turns = [
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "yes"},
    ]
    (tokens,), _ = encoded(tmp_path, [{"messages": turns}], tokenizer)
    assert learnt(tokenizer, tokens) == ["yes<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]
    assert tokenizer.decode(tokens.ids[: tokens.learnt.index(True)]).endswith("<|im_start|>assistant\n")


def test_a_template_that_repeats_an_answer_is_refused(tmp_path):
    template = "{{ messages[1]['content'] + ' ' }}" + PLAIN
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: .*writes message 2 2 times.*generation"):
        encoded(tmp_path, [{"messages": TURNS[1:4]}], make_tokenizer(template))


def test_the_day_is_that_of_the_beginning(tmp_path):
    tokenizer = make_tokenizer(HEADERS)
    (tokens,), _ = encoded(tmp_path, [{"messages": TURNS}], tokenizer)
    assert tokenizer.decode(tokens.ids).startswith("<|endoftext|>04 Mar 2025<|im_start|>")


def test_completions_are_learnt_and_end(tmp_path):
    tokenizer = make_tokenizer()
    (tokens,), _ = encoded(tmp_path, [{"prompt": "What is it?\n", "completion": "It is a test."}], tokenizer)
    assert learnt(tokenizer, tokens) == ["It is a test.<|im_end|>"]
    # A token that both have a part of is learnt: nothing else begins the completion.
    (tokens,), _ = encoded(tmp_path, [{"prompt": "What is it? ", "completion": "It is a test."}], tokenizer)
    assert learnt(tokenizer, tokens) == [" It is a test.<|im_end|>"]
    assert tokenizer.decode(tokens.ids) == "What is it? It is a test.<|im_end|>"


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_texts_are_packed(tmp_path, kind):
    tokenizer = make_tokenizer()
    texts = ["It is a test.", "The model learns.\n" * 5] if kind == "jsonl" else ["The model learns.\nyes\n" * 5]
    stream = [one for text in texts for one in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    if kind == "jsonl":
        made, counts = encoded(tmp_path, [{"text": text} for text in texts], tokenizer, max_length=16)
    else:
        path = tmp_path / "text.txt"
        path.write_text(texts[0])
        counts = Encoder(tokenizer, 16, BEGAN)
        made = list(counts.run(read_rows(path)))
    assert [one for tokens in made for one in tokens.ids] == stream[: sum(len(tokens.ids) for tokens in made)]
    assert len(stream) - sum(len(tokens.ids) for tokens in made) < 2
    assert [len(tokens.ids) for tokens in made[:-1]] == [16] * (len(made) - 1)
    assert all(all(tokens.learnt) for tokens in made)
    assert counts.rows == len(texts)


def test_a_long_text_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("memascend.cli.train.rows._PART_CHARACTERS", 40)
    tokenizer = make_tokenizer()
    path = tmp_path / "text.txt"
    path.write_text("The model learns.\n" * 20)
    rows = list(read_rows(path))
    assert len(rows) > 3
    assert rows[1].place == f"{path}:4"
    made = list(Encoder(tokenizer, 1000, BEGAN).run(rows))
    # One end, where the text ends.
    assert [one for tokens in made for one in tokens.ids] == [*tokenizer(path.read_text())["input_ids"], 2]


def test_what_is_too_long_is_cut_and_counted(tmp_path):
    rows = [
        {"prompt": "yes ", "completion": "no"},
        {"prompt": "yes ", "completion": "no " * 40},
        {"prompt": "yes " * 40, "completion": "no"},
    ]
    made, counts = encoded(tmp_path, rows, max_length=16)
    assert [len(tokens.ids) <= 16 for tokens in made] == [True, True]
    assert (counts.rows, counts.truncated, counts.left_out, counts.sequences) == (3, 2, 1, 2)
    said = counts.said()
    assert "2 examples cut at --max-length 16" in said
    assert "1 of them left out" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "an example must be a JSON object"),
        ('{"words": 1}', "this one has 'words'"),
        ('{"prompt": "a"}', "this one has 'prompt'"),
        ('{"text": "a"}', "this example is `text`, and the ones before are `messages`"),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": ["a"]}', "message 1 must be an object"),
        ('{"messages": [{"role": "user", "content": 1}]}', "message 1 must have a text"),
        ('{"messages": [{"role": "user", "content": "a\\ud800b"}]}', r"\\ud800 is half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role 'assistant'"),
        ('{"messages": [{"role": "bad", "content": "a"}, {"role": "assistant", "content": "a"}]}', "rejects these"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"messages": TURNS}])
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    template = "{% if messages[0]['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}" + CHATML
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3: .*" + said):
        list(Encoder(make_tokenizer(template), 512, BEGAN).run(read_rows(path)))


def test_other_bad_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is of no known kind"):
        next(read_rows(tmp_path / "a.doc"))
    with pytest.raises(ConfigError, match="does not exist"):
        next(read_rows(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match="has no examples"):
        next(read_rows(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"a\.txt:2: not valid UTF-8"):
        next(read_rows(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="both texts"):
        encoded(tmp_path, [{"prompt": 1, "completion": "a"}])
    with pytest.raises(ConfigError, match="`prompt` must be a list of messages"):
        encoded(tmp_path, [{"prompt": [], "completion": "a"}])
    with pytest.raises(ConfigError, match=r":1: `completion` is empty"):
        encoded(tmp_path, [{"prompt": "a", "completion": ""}])
    with pytest.raises(ConfigError, match="chat template"):
        encoded(tmp_path, [{"messages": TURNS}], make_tokenizer(None))


def test_parquet_has_the_same_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}]
    parquet.write_table(arrow.Table.from_pylist([{**row, "id": 1} for row in rows]), tmp_path / "rows.parquet")
    assert [row.values for row in read_rows(tmp_path / "rows.parquet")] == rows
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"bad\.parquet.*not readable as parquet"):
        list(read_rows(tmp_path / "bad.parquet"))


@pytest.fixture
def batches_of(tmp_path):
    """Makes batches of so many short rows."""
    with contextlib.ExitStack() as opened:
        yield lambda count, **options: make_batches(opened, tmp_path, count, options)


def make_batches(opened, tmp_path, count, options):
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"{number} ", "completion": "yes" * (1 + number % 3)} for number in range(count)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    sequences = opened.enter_context(Sequences(Encoder(tokenizer, 64, BEGAN).run(read_rows(path)), tmp_path))
    return Batches(
        **{
            "sequences": sequences,
            "packs": alone(sequences),
            "batch": 2,
            "accumulate": 2,
            "epochs": 2,
            "seed": 3,
            "padding": 0,
            **options,
        }
    )


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(batches_of):
    batches = batches_of(11)
    assert (batches.steps_of_epoch, batches.steps) == (3, 6)
    epochs = [[], []]
    for step in range(6):
        for batch in batches.of_step(step):
            for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
                epochs[step // 3].append(tuple(ids[: int(mask.sum())].tolist()))
    assert len(set(epochs[0])) == 11
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    # The same again in another process: nothing but seed and epoch decides.
    assert batches.order(1) == batches_of(11).order(1)
    assert batches.order(1) != batches_of(11, seed=4).order(1)


def test_padding_is_neither_seen_nor_learnt(batches_of):
    batch = next(batch for batch in batches_of(8).of_step(0) if not batch.attention_mask.all())
    hidden = batch.attention_mask == 0
    assert (batch.input_ids[hidden] == 0).all()
    assert (batch.labels[hidden] == -100).all()
    assert batch.tokens == int(batch.attention_mask.sum())
    kept = batch.labels != -100
    assert (batch.labels[kept] == batch.input_ids[kept]).all()
    assert batch.learnt == int(kept.sum())


def test_the_rate_rises_and_falls():
    rate = Rate(peak=1.0, steps=10, warmup_steps=2, schedule="linear")
    assert [round(rate.of_step(step), 4) for step in range(10)] == [
        0.3333, 0.6667, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125,
    ]  # fmt: skip
    cosine = Rate(peak=1.0, steps=4, warmup_steps=0, schedule="cosine")
    assert [round(cosine.of_step(step), 4) for step in range(4)] == [1.0, 0.8536, 0.5, 0.1464]
    assert Rate(peak=2.0, steps=4, warmup_steps=0, schedule="constant").of_step(3) == 2.0
