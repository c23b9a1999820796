"""The notebook runs from its first cell to its last, with small sizes."""

import pathlib
import re
import warnings

import pytest
import runs

ROOT = pathlib.Path(__file__).parent.parent

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of jupyter's own modules
    import nbclient
    import nbformat


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.filterwarnings("ignore")  # of jupyter and zmq, in this process; not of the notebook
def test_the_quick_start_notebook(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    (settings,) = [c for c in notebook.cells if "settings" in c.metadata.get("tags", [])]
    bindings = [
        f"MODEL_DIR='{tmp_path / 'run'}'",
        "STEPS=4",
        "DELINK_STEP=2",
        "LENGTH=16",
        f"VOCABULARY={runs.VOCABULARY}",
        "ModelConfig.embed_dim=16",
        "ModelConfig.mlp_dim=16",
        "WarmupStableDecay.warmup_steps=1",
        "Sample.max_new_tokens=4",
        "Sample.prompts=('the whale',)",
        "TextData.sources=(@TextFiles(),)",
        "TextData.rates=None",
        f"TextFiles.train='{text}'",
    ]
    settings.source += f"\nBINDINGS = {bindings!r}\n"
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "delink   step 2, stage real: 1 -> 4 distinct layers" in printed
    assert "bits per byte on held-out documents" in printed
    assert "sample: the whale" in printed
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= 3
    shared, own = re.findall(r"^loss of .* layers?: (.*)$", printed, re.M)
    assert float(own) == pytest.approx(float(shared), rel=1e-6)
    assert "M6 Summary" in printed


def test_the_module_is_used_as_readme_says():
    """So the run above has tried README's lines too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    (cell,) = [c for c in notebook.cells if "flax" in c.metadata.get("tags", [])]
    assert f"```python\n{cell.source}\n```" in readme
