"""`Run`: a training run as a Python object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.program.events import Events
from meshwright.report.record import read_run
from meshwright.report.run_page import write_report
from meshwright.report.run_words import headline, verdict
from meshwright.tables import html_table, text_table
from meshwright.training.run_folder import RunFolder

if TYPE_CHECKING:  # torch, which a supervisor never needs
    from meshwright.checkpoint.hf_exchange import Exchanged
    from meshwright.evaluate.perplexity import Perplexity
    from meshwright.models import Transformer

_COLUMNS = ("", "value", "")


@dataclass(frozen=True, repr=False)
class Run:
    """A training run and its folder; `exit_code` is None for a run that was opened.

    Its `repr` shows the run's main numbers, also in a notebook.
    """

    folder: Path
    exit_code: int | None = None

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the run's events, all or those of one kind such as "step"; skips damaged lines."""
        for event in Events.read(RunFolder(self.folder).events):
            if kind is None or event["event"] == kind:
                yield event

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run's HTML page and return its path.

        `out` is the file to write; None means `report/index.html` in the run folder.
        """
        return write_report([self.folder], None if out is None else Path(out))

    def load_model(self) -> Transformer:
        """Return the model of the newest saved step, in fp32; raises `CheckpointError` if none."""
        from meshwright.checkpoint.weights import load_model

        return load_model(self.folder)

    def generate(
        self,
        prompt: str,
        max_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> str:
        """Return the prompt and its continuation by the model of the newest saved step.

        See `meshwright generate`.
        """
        from meshwright.evaluate.talk import Sampling, TextModel

        sampling = Sampling(max_tokens, temperature, top_p, seed)
        generation = TextModel(self.folder).continued(prompt, sampling)
        for _ in generation:
            pass
        return generation.text

    def evaluate(self, rows: int | None = None) -> Perplexity:
        """Return the newest saved step's loss and perplexity on the run's held-out text.

        `rows` limits the number of sequences; None evaluates all. The same as `meshwright eval RUN`
        on a CPU. Raises `ConfigError` if nothing was held out.
        """
        from meshwright.evaluate.perplexity import measure
        from meshwright.evaluate.text import BATCH_TOKENS, held_out, windows_of

        model = self.load_model().eval()
        text = held_out(self.folder, model.spec.vocab_size)
        assert text.seq_len is not None  # held_out is of a run
        windows = windows_of(text, text.seq_len, model.spec.context)
        count = len(windows) if rows is None else min(rows, len(windows))
        batch = max(1, BATCH_TOKENS["cpu"] // text.seq_len)
        return measure(model, windows, text.tokenizer, count, batch)

    def export_hf(self, out: str | Path, dtype: Literal["fp32", "bf16"] = "fp32") -> Exchanged:
        """Write the model as a new Hugging Face folder with its tokenizer, and verify it.

        The same as `meshwright checkpoint export-hf`. If a check fails, `passed` of the result is
        False and nothing was written.
        """
        from meshwright.checkpoint.hf_exchange import export_hf
        from meshwright.data import load_tokenizer
        from meshwright.training.run_folder import tokenizer_of

        stored = tokenizer_of(self.folder)
        tokenizer = load_tokenizer(stored.name, stored.eos, stored.bos)
        return export_hf(self.folder, Path(out), tokenizer, dtype, form=stored.form)

    def __repr__(self) -> str:
        """Return the run's verdict and main numbers as text."""
        record = read_run(self.folder)
        title = f"run {self.folder}: {' '.join(verdict(record))}"
        return f"{title}\n{text_table(_COLUMNS, headline(record))}"

    def _repr_html_(self) -> str:
        """Return the run's verdict and main numbers as HTML, for a notebook."""
        record = read_run(self.folder)
        title = f"run {self.folder}"
        return html_table(_COLUMNS, headline(record), [title, *verdict(record)])


def open_run(folder: str | Path) -> Run:
    """Return the run in a folder such as `runs/latest`; raises `ConfigError` if it is not a run."""
    path = Path(folder)
    read_run(path)
    return Run(path)
