"""Several conversations share a device cache that is too small for them: python examples/demo.py

Their KV blocks wait in host memory while nobody talks and come back layer by layer while the model computes. At the end
everything is compared, bit for bit, with a run that recomputes it all. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # a checkout in which the operators were built in place

import paddle  # noqa: E402
from meeting import check_meetings  # noqa: E402
from model import Model, ModelConfig  # noqa: E402
from recompute import differences  # noqa: E402
from serving import TIMEOUT_S, Conversation, Server, Turn, blocks_for  # noqa: E402
from timeline import draw, overlap_ms, total_ms  # noqa: E402

from paddle_kv import devices  # noqa: E402
from paddle_kv.schedule.trace import Span, spans_of, write_trace  # noqa: E402

TEXTS = (ROOT / "README.md", ROOT / "LICENSE")
BLOCK_SIZE = 16
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One turn in figures.

    Attributes:
        waited_ms: the model stood still for a layer of the prefix.
        moving_ms: the copies of this turn's transfers.
        hidden_ms: the part of moving_ms during which the model was computing.
    """

    conversation: str
    turn: int
    reused_tokens: int
    new_tokens: int
    onload_bytes: int
    offload_bytes: int
    waited_ms: float
    moving_ms: float
    hidden_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "gpu" and not devices.has_gpu():
        raise SystemExit("demo: this Paddle sees no GPU")
    paddle.set_device(options.device if options.device == "cpu" else devices.name_of(0))
    conversations = split_texts(TEXTS, options)
    server = start_server(conversations, options)
    turns = serve(server, conversations, options)
    rows = report(turns)
    print_table(rows)
    print_totals(rows)

    print("\nChecking against a run that recomputes everything ...", flush=True)
    found = [line for conversation in conversations for line in differences(server, conversation)]
    server.close()
    if options.chunk_tokens:
        print("\nServing each text again, from both ends ...", flush=True)
        prompts = [b"".join(conversation.prompts) for conversation in conversations]
        found += check_meetings(
            server.model, prompts, block_size=BLOCK_SIZE, chunk_tokens=options.chunk_tokens, device=options.device
        )
    write_outputs(rows, turns, server, found, options)
    if found:
        print("\nFAILED\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    tokens = sum(len(turn.answer) for turn in turns)
    cached = sum(conversation.cached_tokens for conversation in conversations)
    print(f"All {tokens} generated tokens and the keys and values of all {cached} cached tokens are identical.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=4, metavar="N")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="turns of each conversation")
    parser.add_argument("--first-prompt", type=int, default=512, metavar="BYTES")
    parser.add_argument("--next-prompts", type=int, default=48, metavar="BYTES")
    parser.add_argument(
        "--answer",
        type=int,
        default=8,
        metavar="TOKENS",
        help="tokens generated per turn",
    )
    parser.add_argument("--layers", type=int, default=ModelConfig.num_layers)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=0,
        metavar="N",
        help=f"serve the texts once more in chunks of so many tokens (a multiple of {BLOCK_SIZE}), which are computed "
        "from the front while what was saved comes from the back",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where model and cache are")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the timeline")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV")
    return parser.parse_args(arguments)


def split_texts(texts: Sequence[Path], options: argparse.Namespace) -> list[Conversation]:
    """Conversations about the texts in turn, each with the next passage, cut into prompts."""
    sizes = [options.first_prompt] + [options.next_prompts] * (options.turns - 1)
    unread = [path.read_bytes() for path in texts]
    conversations = []
    for number in range(options.conversations):
        source = number % len(texts)
        prompts = []
        for size in sizes:
            if len(unread[source]) < size:
                raise SystemExit(
                    f"{texts[source].name} is too short for these conversations; ask for fewer or shorter ones"
                )
            prompts.append(unread[source][:size])
            unread[source] = unread[source][size:]
        conversations.append(Conversation(f"{texts[source].stem} {number // len(texts) + 1}", prompts))
    return conversations


def start_server(conversations: Sequence[Conversation], options: argparse.Namespace) -> Server:
    """A device cache with room for the conversation that runs and one that is being saved; host memory for all."""
    model = Model(ModelConfig(num_layers=options.layers))
    spec = model.config.cache_spec(BLOCK_SIZE)
    needed = [blocks_for(sum(map(len, c.prompts)) + options.turns * options.answer, spec) for c in conversations]
    device_blocks = 2 * max(needed)
    print(
        f"{len(conversations)} conversations, {options.turns} turns each, {options.layers} layers. Their KV cache "
        f"takes {sum(needed)} blocks of {BLOCK_SIZE} tokens; the device has {device_blocks} of them.\n",
        flush=True,
    )
    return Server(
        model,
        block_size=BLOCK_SIZE,
        device_blocks=device_blocks,
        host_blocks=sum(needed),
        device=options.device,
    )


def serve(server: Server, conversations: Sequence[Conversation], options: argparse.Namespace) -> list[Turn]:
    turns = []
    for _ in range(options.turns):
        for conversation in conversations:
            started = time.perf_counter()
            turn = server.turn(conversation, options.answer)
            turns.append(turn)
            print(
                f"{turn.conversation}, turn {turn.number}: {turn.reused_tokens} tokens re-used, "
                f"{turn.prompt_tokens} new, {len(turn.answer)} generated in {time.perf_counter() - started:.2f} s",
                flush=True,
            )
    server.scheduler.drain(TIMEOUT_S)
    return turns


def report(turns: Sequence[Turn]) -> list[Row]:
    computing = [span for turn in turns for span in turn.spans if span.lane == "compute"]
    rows = []
    for turn in turns:
        transfers = [turn.onload, *turn.offloads]
        moving = [spans_of(transfer) for transfer in transfers]
        rows.append(
            Row(
                conversation=turn.conversation,
                turn=turn.number,
                reused_tokens=turn.reused_tokens,
                new_tokens=turn.prompt_tokens + len(turn.answer),
                onload_bytes=turn.onload.bytes,
                offload_bytes=sum(transfer.bytes for transfer in turn.offloads),
                waited_ms=total_ms(span for span in turn.spans if span.lane == "wait"),
                moving_ms=sum(map(total_ms, moving)),
                hidden_ms=sum(overlap_ms(spans, computing) for spans in moving),
            )
        )
    return rows


TABLE_COLUMNS = 120  # where the output is a file or a pipe
HEADINGS = (
    "conversation",
    "turn",
    "re-used",
    "new",
    "MiB in",
    "MiB out",
    "waited ms",
    "moving ms",
    "hidden ms",
)
LEGEND = """\
re-used  tokens whose keys and values came back from host memory      new      tokens computed in this turn
in, out  onloaded to the device, offloaded to host memory             waited   the model stood still for a layer
moving   time of the transfers of this turn                           hidden   of it while the model was computing"""


def cells_of(row: Row) -> list[str]:
    counts = (row.turn, row.reused_tokens, row.new_tokens)
    figures = (
        row.onload_bytes / MIB,
        row.offload_bytes / MIB,
        row.waited_ms,
        row.moving_ms,
        row.hidden_ms,
    )
    return [
        row.conversation,
        *map(str, counts),
        *(f"{figure:.1f}" for figure in figures),
    ]


def print_table(rows: Iterable[Row]) -> None:
    cells = [cells_of(row) for row in rows]
    print()
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]
        for line in [list(HEADINGS), *cells]:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in HEADINGS:
            table.add_column(
                heading,
                justify="left" if heading == "conversation" else "right",
                no_wrap=True,
            )
        for line in cells:
            table.add_row(*line)
        console = Console()
        (console if console.is_terminal else Console(width=TABLE_COLUMNS)).print(table)
    print(LEGEND)


def print_totals(rows: Sequence[Row]) -> None:
    moved = sum(row.onload_bytes + row.offload_bytes for row in rows)
    moving_ms, hidden_ms = (
        sum(row.moving_ms for row in rows),
        sum(row.hidden_ms for row in rows),
    )
    waited_ms = sum(row.waited_ms for row in rows)
    print(
        f"\n{moved / MIB:.0f} MiB moved in {moving_ms:.0f} ms, {hidden_ms:.0f} ms of it while the model computed; "
        f"the model waited {waited_ms:.0f} ms."
    )


def timeline_of(turn: Turn) -> list[Span]:
    """The prompt of a turn: its passes through the model after it, one per token, would only stretch the picture."""
    spans = spans_of(turn.onload) + spans_of(turn.offloads[0])
    layers = 1 + max(span.layer for span in turn.spans)
    return spans + turn.spans[: 1 + 3 * layers]


def write_outputs(
    rows: Sequence[Row],
    turns: Sequence[Turn],
    server: Server,
    found: Sequence[str],
    options: argparse.Namespace,
) -> None:
    shown = turns[-1]
    title = f"{shown.conversation}, turn {shown.number}"
    spans = timeline_of(shown)
    trace = options.out / "demo_timeline.json"
    write_trace(trace, spans=spans)
    print(f"\nTrace of the prompt of {title}: {trace} (open in ui.perfetto.dev)")
    picture = options.out / "demo_timeline.png"
    try:
        draw(
            spans,
            picture,
            f"{title}: {shown.reused_tokens} tokens come back, {shown.prompt_tokens} are new",
        )
        print(f"Picture of it: {picture}")
    except ImportError:
        print("No picture of it: matplotlib is not installed")
    if options.json:
        result = {
            "device": paddle.get_device(),
            "identical": not found,
            "differences": list(found),
            "turns": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
