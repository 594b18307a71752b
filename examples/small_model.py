"""Makes a small model, and training data from the source files of Python's standard library. Downloads nothing.

    python examples/small_model.py small

`small/model` has the same files as a model from the Hub: config.json, safetensors files with random values, and a
tokenizer with a chat template. `small/data` has conversations, prompts with completions, and plain texts, which
`memascend train` reads. The docs have commands for this model and data. `--layers 24 --width 1024` makes a model that
is large enough to be worth offloading. `--kind mixtral` makes a mixture of experts.
"""

import argparse
import ast
import json
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast, Qwen2Config

KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mixtral": MixtralConfig}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The ChatML template, which many models use.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The largest number of source files that are read.
FILES = 100
# The number of source files that train the tokenizer. More files take longer, but do not improve the vocabulary.
LEARNT_FROM = 25


def read_library() -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the texts of source files, and the name and first docstring paragraph of functions and classes.

    Leaves out functions and classes without a docstring, and those in files whose name begins with "_".
    """
    sources, described = [], []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]:
        source = file.read_text(encoding="utf-8", errors="replace")
        sources.append(source)
        if file.stem.startswith("_"):
            continue
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            if text and text.strip():
                described.append((f"{file.stem}.{node.name}", " ".join(text.split("\n\n")[0].split())))
    return sources, described


def make_tokenizer(sources: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-pair tokenizer on source files."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sources[:LEARNT_FROM], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=TEMPLATE,
    )


def make_model(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """Makes a model with random values. The same options give the same values."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if options.kind == "mixtral" else {}
    config = KINDS[options.kind](
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **experts,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))


def write_data(folder: Path, sources: list[str], described: list[tuple[str, str]], rows: int) -> None:
    """Writes a training file and an evaluation file for each kind of example. Every tenth example is for evaluation.

    Also writes text.txt, and messages.parquet if pyarrow is installed.
    """
    kinds = {
        "messages": [
            {
                "messages": [
                    {"role": "user", "content": f"What is {name} in Python?"},
                    {"role": "assistant", "content": text},
                ]
            }
            for name, text in described
        ],
        "prompts": [{"prompt": f"# {name}: ", "completion": text} for name, text in described],
        "texts": [{"text": source} for source in sources],
    }
    for kind, all_rows in kinds.items():
        chosen = all_rows[:rows]
        parts = {kind: [row for at, row in enumerate(chosen) if at % 10], f"{kind}_eval": chosen[::10]}
        for name, part in parts.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "text.txt").write_text("\n".join(sources[:rows]), encoding="utf-8")
    try:
        import pyarrow.parquet
    except ImportError:
        print("no parquet file was written, because pyarrow is not installed")
        return
    table = pyarrow.Table.from_pylist(kinds["messages"][:rows])
    pyarrow.parquet.write_table(table, folder / "messages.parquet")


def main() -> None:
    """Makes the folders `model` and `data`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="the folder in which model/ and data/ are made; existing files are replaced"
    )
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="float32 (the default) is fast on every processor; most models are in bfloat16",
    )
    parser.add_argument("--rows", type=int, default=1000, help="the largest number of rows in a file")
    options = parser.parse_args()

    sources, described = read_library()
    tokenizer = make_tokenizer(sources, options.vocabulary)
    model = make_model(options, tokenizer)
    model.save_pretrained(options.folder / "model")
    tokenizer.save_pretrained(options.folder / "model")
    data = options.folder / "data"
    data.mkdir(exist_ok=True)
    write_data(data, sources, described, options.rows)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.folder}/model has {count / 1e6:.1f} M parameters and {len(tokenizer)} tokens")
    for file in sorted(data.iterdir()):
        print(f"{file} has {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
