"""The command ``paddle-kv``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

try:
    import rich.console
    import typer
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.progress import Progress
except ImportError:
    sys.exit("paddle-kv needs typer and rich: pip install 'paddle_kv[cli]'")

try:
    from .. import ops as _ops  # noqa: F401  `paddle-kv doctor` is meant for an installation where they are missing
except ImportError as error:
    sys.exit(f"paddle-kv: {error}")
from .. import __version__
from ..bench import methods, models
from ..bench import report as reports
from ..bench.load import LOADS
from ..bench.run import Axes, WrongBytes, sweep
from ..bench.setup import ALIGNMENTS, OPERATIONS, PATTERNS, WAYS
from ..devices import has_gpu
from ..offload.policies import DEFAULT_POLICY, POLICIES
from ..testing.prefixes.hints import Hints
from ..testing.prefixes.live_replay import shrunk
from ..testing.prefixes.replay import Costs
from ..testing.prefixes.serving import Machine
from ..testing.prefixes.trace import TOKENS_PER_BLOCK, not_of_prefixes, read_trace
from . import calibrate as calibration
from . import doctor as checks
from . import environment
from . import replay as replays
from . import replay_decisions as deciding
from . import replay_plots as plots
from .files import check_distinct, output_file, picture_file, picture_folder, positive, writing
from .soak import soak
from .tier import app as tier_app

TABLE_COLUMNS = 150  # where the output is a file or a pipe
MOST_BLOCKS = 10**15


def _show(table: Any) -> None:
    """A line may be longer than the terminal is wide: no figure is cut off."""
    console = rich.console.Console()
    width = console.width if console.is_terminal else TABLE_COLUMNS
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    rich.console.Console(width=max(width, needed)).print(table)


def _line(text: str) -> None:
    rich.console.Console(soft_wrap=True).print(text)


app = typer.Typer(no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        print(f"paddle-kv {__version__}")
        raise typer.Exit


@app.callback()
def paddle_kv(
    version: Annotated[
        bool, typer.Option("--version", help="Tell the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """KV-cache memory operations for PaddlePaddle."""


bench_app = typer.Typer(help="Measure how fast blocks move.")
app.add_typer(bench_app, name="bench")
app.add_typer(tier_app, name="tier")
app.command()(soak)

Pattern = Enum("Pattern", {name: name for name in PATTERNS}, type=str)
Operation = Enum("Operation", {name: name for name in OPERATIONS}, type=str)
Way = Enum("Way", {name: name for name in WAYS}, type=str)
Backend = Enum("Backend", {name: name for name in methods.METHODS}, type=str)
Model = Enum("Model", {name: name for name in models.NAMES}, type=str)
Load = Enum("Load", {name: name for name in LOADS}, type=str)
PolicyName = Enum("PolicyName", {name: name for name in POLICIES}, type=str)
Device = Enum("Device", {name: name for name in ("simulated", "real")}, type=str)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Annotated[Model, typer.Option(help="Whose KV cache.")] = Model["Llama-3.1-8B"],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that share the KV heads.")] = 1,
    layers: Annotated[int, typer.Option(help="Fewer layers than the model has; 0 takes all.", min=0)] = 0,
    op: Annotated[Operation, typer.Option(help="What is done; all but swap work inside the device.")] = Operation.swap,
    tokens: Annotated[list[int], typer.Option(help="Tokens per block; repeat to sweep.", min=1)] = [16],  # noqa: B006
    blocks: Annotated[list[int], typer.Option(help="Blocks that move; repeat to sweep.", min=1)] = [256],  # noqa: B006
    direction: Annotated[
        list[Way], typer.Option(help="Which way; repeat to sweep. Default: h2d and d2h, or d2d where that is all.")
    ] = [],  # noqa: B006
    pattern: Annotated[list[Pattern], typer.Option(help="Where the blocks lie.")] = [Pattern.scattered],  # noqa: B006
    backend: Annotated[list[Backend], typer.Option(help="Methods to compare; default all.")] = [],  # noqa: B006
    alignment: Annotated[
        list[int],
        typer.Option(help="Bytes modulo which source and target addresses agree: the widest words; repeat to sweep."),
    ] = [16],  # noqa: B006
    load: Annotated[Load, typer.Option(help="Matrix products that run beside (GPU).")] = Load.none,
    pageable: Annotated[bool, typer.Option(help="Host memory that is not page-locked.")] = False,
    warmups: Annotated[int, typer.Option(help="Runs before the first that counts.", min=0)] = 2,
    repeats: Annotated[
        int, typer.Option(help="Runs of which the median is shown; of fewer than 5 no noise is known.", min=1)
    ] = 7,
    seed: Annotated[int, typer.Option(help="Of the block ids.", min=0)] = 0,
    calibrate: Annotated[
        bool,
        typer.Option(
            help="Measure the transfer engines instead (two minutes, 3 runs of each), for engine 'auto' from then on."
        ),
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.", callback=output_file)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.", callback=output_file)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw bandwidth over piece size (PNG); a roofline beside it.", callback=picture_file),
    ] = None,
) -> None:
    """Move scattered blocks by every method, beside one contiguous copy of the same bytes."""
    if context.invoked_subcommand:
        return
    if load is not Load.none and not has_gpu():
        raise typer.BadParameter("a load needs a GPU", param_hint="--load")
    if not set(alignment) <= set(ALIGNMENTS):
        choices = ", ".join(map(str, ALIGNMENTS))
        raise typer.BadParameter(f"{alignment} must be of {choices}", param_hint="--alignment")
    check_distinct({"--csv": csv, "--json": json_file, "--plot": plot})
    if calibrate and (json_file or plot):
        raise typer.BadParameter("--calibrate writes a --csv and no other file", param_hint="--json and --plot")
    axes = Axes(
        model=model.value,
        tp=tp,
        num_layers=layers or None,
        op=op.value,
        tokens_per_block=tokens,
        num_blocks=blocks,
        directions=[one.value for one in direction] or (["h2d", "d2h"] if op is Operation.swap else ["d2d"]),
        patterns=[one.value for one in pattern],
        backends=[one.value for one in backend] or list(methods.METHODS),
        alignments=alignment,
        load=load.value,
        pinned=not (pageable and has_gpu()),  # without a GPU all memory is pageable, and all methods take it
        warmups=warmups,
        repeats=repeats,
        seed=seed,
    )
    with Progress(transient=True) as bar:
        task = bar.add_task("measuring")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            if calibrate:
                costs, path, rows = calibration.run(show)
                _show(calibration.table(costs))
                _line(escape(f"stored in {path}"))
                if csv:
                    with writing():
                        calibration.write_csv(rows, csv)
                return
            result = sweep(axes, environment.summary(), show)
        except (ValueError, MemoryError) as error:
            raise typer.BadParameter(str(error)) from None
        except WrongBytes as error:
            _line(f"[red]FAIL[/] {escape(str(error))}; please report this with the output of paddle-kv env --json")
            raise typer.Exit(1) from None
    _show(reports.table(result))
    unfit = [one.value for one in backend if one.value not in {row.backend for row in result.rows}]
    if unfit:
        _line(f"not for this operation, pattern or machine: {', '.join(unfit)}")
    with writing():
        if csv:
            reports.write_csv(result, csv)
        if json_file:
            reports.write_json(result, json_file)
        if plot:
            reports.plot(result, plot)
            reports.plot_roofline(result, plot.with_stem(plot.stem + "-roofline"))


@bench_app.command()
def compare(before: Path, after: Path) -> None:
    """Two files of --json: ratio of the rates, and whether it is more than the noise."""
    try:
        _show(reports.compare(reports.read_json(before), reports.read_json(after)))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, hash_ids (Mooncake's traces).")],
    policy: Annotated[
        list[PolicyName],
        typer.Option(help=f"Repeat to compare. --queue takes the first one. Default: all, and {DEFAULT_POLICY}."),
    ] = [],  # noqa: B006
    capacity: Annotated[
        list[int],
        typer.Option(
            help=f"Blocks in host memory; repeat to sweep. Default: {replays.PARTS_TEXT} of the distinct blocks.",
            min=1,
            max=MOST_BLOCKS,
        ),
    ] = [],  # noqa: B006
    requests: Annotated[int | None, typer.Option(help="Only so many requests of the trace.", min=1)] = None,
    model: Annotated[Model, typer.Option(help="Whose KV cache.")] = Model["Llama-3.1-70B"],
    tp: Annotated[int, typer.Option(help="Ranks; each has a link and its part of each block.")] = 8,
    tokens_per_block: Annotated[
        int, typer.Option(help="Prompt tokens that an id of the trace stands for.", min=1, max=MOST_BLOCKS)
    ] = TOKENS_PER_BLOCK,
    link_gbps: Annotated[float, typer.Option(help="Host to device, GB/s per rank.", callback=positive)] = 50.0,
    prefill_tokens_per_s: Annotated[float, typer.Option(help="Of all ranks together.", callback=positive)] = 60_000.0,
    tier: Annotated[
        str | None,
        typer.Option(metavar="file:DIR[:BYTES]", help="A tier below host memory; of one rank. Default: 100 GiB."),
    ] = None,
    tier_gbps: Annotated[float, typer.Option(help="Out of the tier, GB/s per rank.", callback=positive)] = 5.0,
    queue: Annotated[
        int | None,
        typer.Option(help="Also decide for each request, while so many that wait may load ahead; simulated.", min=0),
    ] = None,
    ends: Annotated[bool, typer.Option(help="simulated: policies are told when a session is over.")] = False,
    wrong_ends: Annotated[
        float, typer.Option(help="simulated: the share of them that is told the wrong way round.", min=0, max=1)
    ] = 0.0,
    expect: Annotated[int, typer.Option(help="simulated: so many requests ahead are expected.", min=0)] = 0,
    warm_up: Annotated[int, typer.Option(help="simulated: first requests that are not counted.", min=0)] = 0,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.", callback=output_file)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write rows and costs to this file.", callback=output_file)
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option(help="Write what --queue decides for every request (CSV, or JSON: *.json).", callback=output_file),
    ] = None,
    waits: Annotated[
        Path | None, typer.Option(help="Write the waiting time of every request (CSV).", callback=output_file)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw up to three PNG files in this directory.", callback=picture_folder)
    ] = None,
    device: Annotated[Device, typer.Option(help="real: moves bytes, on a GPU or in RAM.")] = Device.simulated,
    time_scale: Annotated[
        float, typer.Option(help="real: seconds for a second of the trace.", callback=positive)
    ] = 0.01,
    real_layers: Annotated[int, typer.Option(help="real: layers of a block.", min=1)] = 4,
    real_block_bytes: Annotated[int, typer.Option(help="real: bytes of a block, all layers.", min=1)] = 1 << 16,
) -> None:
    """Replay a trace: hit rates of the eviction policies, and what loading saves over recomputing.

    In simulated time, or (--device real) with real transfers of smaller blocks in shorter time.
    """
    check_distinct({"--csv": csv, "--json": json_file, "--waits": waits, "--decisions": decisions}, read=[trace])
    if queue is None and decisions:
        raise typer.BadParameter("--decisions needs --queue")
    if queue is not None and device is Device.real:
        raise typer.BadParameter("--queue is simulated; leave out --device real")
    decided, curve = [], None
    with Progress(transient=True) as bar:
        task = bar.add_task("reading")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            spec = models.model_spec(model.value, tp=tp, tokens_per_block=tokens_per_block)
            block_bytes = spec.block_bytes * spec.num_layers
            costs = Costs(
                block_bytes, spec.num_layers, link_gbps * 1e9, prefill_tokens_per_s, tokens_per_block, tier_gbps * 1e9
            )
            below = replays.tier_option(tier)
            all_requests = read_trace(trace, requests)
            capacities = sorted(set(capacity)) or replays.default_capacities(all_requests)
            policies = list(dict.fromkeys(one.value for one in policy or PolicyName))
            served_with = policies[0] if policy else DEFAULT_POLICY
            if device is Device.real:
                if ends or wrong_ends or expect or warm_up:
                    raise ValueError("--ends, --wrong-ends, --expect and --warm-up are for simulated time")
                costs = replace(costs, block_bytes=real_block_bytes, num_layers=real_layers)
                both = replays.run_live(all_requests, policies, capacities, costs, time_scale, show, below)
                all_requests = shrunk(all_requests, time_scale)
                runs = [one.real for one in both]
                rows = replays.live_rows(both, all_requests)
            else:
                if warm_up >= len(all_requests):
                    raise ValueError(f"--warm-up {warm_up} leaves nothing of {len(all_requests)} requests")
                hints = Hints(ends or wrong_ends > 0, wrong_ends, expect)
                runs = replays.run_all(all_requests, policies, capacities, costs, show, below, hints, warm_up)
                all_requests = all_requests[warm_up:]
                rows = [replays.row_of(run, all_requests, costs) for run in runs]
            if queue is not None:
                last = [run for run in runs if run.policy == served_with][-1]
                machine = Machine(costs, queue=queue)
                decided = deciding.decide_all(all_requests, last, machine)
                if plot:
                    curve = plot / "first_token.png"
                    deciding.plot(all_requests, last, machine, curve, show)
        except (OSError, ValueError, MemoryError) as error:
            raise typer.BadParameter(str(error)) from None
    _show(replays.table(rows))
    if decided:
        _line(f"\nSeconds to the first token, {served_with}, {last.capacity_blocks} blocks:")
        _show(deciding.table(decided))
        _line(deciding.choices(decided))
    if (found := not_of_prefixes(all_requests)) is not None:
        _line(escape(f"{found}: these are no hashes of prefixes, for which alone the optimum is a bound"))
    with writing():
        if csv:
            replays.write_csv(rows, csv)
        if json_file:
            replays.write_json(rows, costs, json_file, time_scale=time_scale if device is Device.real else None)
        if waits:
            replays.write_waits(runs, all_requests, waits)
        if decisions:
            deciding.write(decided, decisions)
        if plot:
            for path in plots.plot(runs, all_requests, costs, plot) + ([curve] if curve else []):
                _line(escape(str(path)))


@app.command()
def doctor() -> None:
    """Check the installation with real copies; exit code 1 if anything is wrong."""
    failed = 0
    for finding in checks.examine():
        failed += finding.passed is False
        mark = {True: "[green]ok[/]  ", False: "[red]FAIL[/]", None: "-   "}
        _line(f"{mark[finding.passed]} {finding.name}: {escape(finding.text)}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def env(json_output: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Versions, build, GPUs and memory, for bug reports."""
    facts: dict[str, Any] = environment.collect()
    if json_output:
        print(json.dumps(facts, indent=1))
        return
    for name, value in facts.items():
        _line(escape(f"{name}: {value}"))


if __name__ == "__main__":
    app()
