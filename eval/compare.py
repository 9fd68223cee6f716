"""Compares runs across heads and seeds: tables, statistics, figures.

    python -m eval.compare out/a out/b --baseline out/a --out out/comparison

Writes comparison.csv, comparison.json, report.md and the figures (PNG and SVG). The baseline is the group (family, head, options)
that the named run belongs to; runs are paired with it by seed. Runs that differ in more than their head are refused.
"""

from pathlib import Path

from commands import Parser, command
from eval.comparison import Comparison, compare
from eval.report import as_csv, as_json, report, terminal_table
from eval.run_folder import read_run
from eval.run_metrics import Terms
from training.checkpoint import write_text
from training.record import strict_json


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m eval.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--baseline", required=True, metavar="RUN", help="a run of the group that the others are compared with")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the report goes")
    parser.add_argument("--force", action="store_true", help="compare even runs that differ in more than their head")
    parser.add_argument("--include-warmup", action="store_true", help="gradient statistics over all steps, the warm-up's too")
    parser.add_argument("--target-nll", type=float, help="loss that energy is measured up to (default: the baseline's final val NLL)")
    asked = parser.parse_args(argv)

    runs = [read_run(path) for path in asked.runs]
    terms = Terms(asked.include_warmup, asked.target_nll)
    comparison = compare(runs, read_run(asked.baseline), terms, asked.force)
    write(comparison, Path(asked.out))
    print(terminal_table(comparison))
    print(f"report: {Path(asked.out) / 'report.md'}")


def write(comparison: Comparison, out_dir: Path) -> None:
    """Writes the tables, the figures and the report into `out_dir`."""
    from eval.figures import draw_all, save  # matplotlib

    out_dir.mkdir(parents=True, exist_ok=True)
    figures = draw_all(comparison)
    for name, figure in figures.items():
        save(figure, out_dir, name)
    write_text(out_dir / "comparison.csv", as_csv(comparison))
    write_text(out_dir / "comparison.json", strict_json(as_json(comparison), indent=2) + "\n")
    write_text(out_dir / "report.md", report(comparison, list(figures)))


if __name__ == "__main__":
    command(main)
