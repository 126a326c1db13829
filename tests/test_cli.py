"""Every command from start to end, its JSON, its refusals in one line, and its exit codes."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import msrm
from msrm import archive, cli
from msrm.cli import commands
from msrm.cli.settings import estimator_of, read_settings
from msrm.cli.wording import as_typed
from msrm.gp.gibbs import chains
from msrm.gp.storage import DrawStore
from msrm.quasi_newton import INTERRUPTED
from msrm.recording import RecordingWarning

COMMANDS = ["simulate", "fit", "sample", "predict", "evaluate", "plot", "info", "doctor"]
TOML = """
n_factors = 2
latent_step = 0.9
seed = 3

[responses.brain]
family = "Identity"

[responses.rating]
family = "Gaussian"
width = 0.6
lag = {start = 0.0, bounds = [-1.5, 1.5], prior = {family = "Normal", mean = 0.5, sd = 1.0}}

[responses.physiology]
family = "Gaussian"
width = 0.8
lag = 1.0
"""


def run(*words: object) -> object:
    """The outcome of one command: exit_code, stdout, stderr."""
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def answer(*words: object) -> dict:
    """The JSON of a command that must end well."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def problem(*words: object) -> str:
    """The one line of a command that must end with 1."""
    done = run(*words)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("msrm: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a recording of two runs, settings, and a fit of the first run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "fit.toml").write_text(TOML)
    options = ("--features", 8, "--participants", 3, "--runs", 2, "--seconds", 90, "--factors", 2)
    answer("simulate", folder / "rec.nc", *options, "--truth", folder / "truth.nc")
    answer("fit", folder / "rec.nc", folder / "fit.nc", "-c", folder / "fit.toml", "--run", "run-1")
    return folder


class TestStart:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_help(self, command):
        done = run(command, "--help")
        assert done.exit_code == 0
        assert "--json" in done.stdout
        assert command in run("--help").stdout

    def test_version(self):
        assert run("--version").stdout == f"msrm {msrm.__version__}\n"

    def test_as_a_module(self):
        done = subprocess.run([sys.executable, "-m", "msrm", "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"msrm {msrm.__version__}\n")

    def test_help_needs_no_numbers(self):
        code = (
            "import sys, msrm.cli\n"
            "heavy = {'numpy', 'scipy', 'xarray', 'jax', 'matplotlib', 'pandas'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_importing_the_package_is_quick(self):
        def seconds(code: str) -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
            return time.perf_counter() - start

        # The least of several, less what Python itself takes: a busy machine only ever adds.
        bare = min(seconds("pass") for _ in range(5))
        assert min(seconds("import msrm") for _ in range(5)) - bare < 0.5


class TestCommands:
    def test_simulate_and_info(self, work):
        found = answer("info", work / "rec.nc")
        recording = msrm.open_recording(work / "rec.nc")
        assert found["digest"] == recording.digest()
        assert found["runs"] == ["run-1", "run-2"]
        assert found["streams"][0] == {
            "stream": "p1/run-1/brain",
            "times": 51,
            "features": 8,
            "first": 0.0,
            "last": 90.0,
            "missing": 0.0,
        }
        truth = archive.read_tree(work / "truth.nc")
        _, made_by = msrm.simulate(features=8, participants=3, runs=2, seconds=90.0, factors=2)
        np.testing.assert_array_equal(
            truth["parameters/loading/p1/brain/value"].values, made_by.parameters["loading/p1/brain"]
        )
        np.testing.assert_array_equal(truth["latent/run-2/mean"].values, made_by.latent["run-2"].values)

    def test_fit_is_the_fit_of_python(self, work):
        found = answer("info", work / "fit.nc")
        estimator = msrm.RMSRM(
            n_factors=2,
            latent_step=0.9,
            seed=3,
            responses={
                "brain": msrm.Identity(),
                "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0))),
                "physiology": msrm.Gaussian(width=0.8, lag=1.0),
            },
        )
        same = estimator.fit(msrm.open_recording(work / "rec.nc").select(runs=["run-1"]))
        assert found["fit"]["objective"] == same.objective_
        assert found["fit"]["responses"]["rating"]["lag"] == same.responses_["rating"].start["lag"]
        assert found["kind"] == "RMSRM"
        assert found["recording_digest"] == same.recording_digest_
        assert found["runtime"]["versions"]["numpy"] == np.__version__

    def test_a_parameter_at_its_bound_is_told(self, work):
        narrow = "responses.rating.lag={start=-1.2, bounds=[-1.5, -1.0]}"
        words = ("fit", work / "rec.nc", work / "bound.nc", "-c", work / "fit.toml")
        found = answer(*words, "-s", narrow)
        assert found["at_bounds"] == ["rating: lag"]
        assert "lag -1.000 (at its bound)" in run("info", work / "bound.nc").stdout
        assert answer("info", work / "fit.nc")["fit"]["at_bounds"] == []

    def test_an_interrupted_fit_is_saved_and_ends_with_130(self, work, monkeypatch):
        fit = msrm.RMSRM.fit

        def interrupted(self, recording):
            fit(self, recording)
            self.stop_reason_, self.converged_ = INTERRUPTED, False
            return self

        monkeypatch.setattr(msrm.RMSRM, "fit", interrupted)
        done = run("fit", work / "rec.nc", work / "half.nc", "-c", work / "fit.toml")
        assert done.exit_code == 130
        assert f"NOT converged: {INTERRUPTED}" in done.stdout
        assert msrm.open_fit(work / "half.nc").n_iter_ > 0
        kept = (work / "half.nc").read_bytes()
        again = run("fit", work / "rec.nc", work / "half.nc", "-c", work / "fit.toml")
        assert "half.interrupted.nc" in again.stdout
        assert (work / "half.nc").read_bytes() == kept

    @pytest.mark.parametrize(
        "words", [("predict", "fit.nc", "rec.nc", "rec.nc", "-t", "p1/rating"), ("fit", "rec.nc", "rec.nc")]
    )
    def test_an_input_is_never_written_over(self, work, words):
        kept = (work / "rec.nc").read_bytes()
        named = [work / word if word.endswith(".nc") else word for word in words]
        done = run(*named, *(["-c", work / "fit.toml"] if words[0] == "fit" else []))
        assert done.exit_code == 1
        assert "is an input" in done.output
        assert (work / "rec.nc").read_bytes() == kept

    def test_a_bids_folder(self, forrest):
        with pytest.warns(RecordingWarning, match="constant"):
            found = answer("info", forrest, "--task", "movie")
        assert set(found["participants"]) == {"ao", "av", "movie"}

    def test_predict(self, work):
        words = ("predict", work / "fit.nc", work / "rec.nc", work / "out.nc", "-t", "p1/rating", "--run", "run-2")
        found = answer(*words, "--source", "across")
        assert [row["stream"] for row in found["streams"]] == ["p1/run-2/rating"]
        saved = archive.read_tree(work / "out.nc")
        recording = msrm.open_recording(work / "rec.nc").select(runs=["run-2"])
        wanted = msrm.open_fit(work / "fit.nc").predict(recording, targets={"p1": ["rating"]}, source="across")
        np.testing.assert_array_equal(saved["p1/run-2/rating/mean"].values, wanted["p1/run-2/rating/mean"].values)

    def test_predict_at_regular_times(self, work):
        words = ("predict", work / "fit.nc", work / "rec.nc", work / "fine.nc", "-t", "p1/rating", "--every", 0.5)
        assert answer(*words)["streams"][0]["time"] == 181

    def test_evaluate_by_runs(self, work):
        out = work / "scores.nc"
        found = answer("evaluate", work / "rec.nc", "-c", work / "fit.toml", "-t", "p1/rating", "-o", out)
        assert found["hold_out"] == "runs"
        assert set(found["streams"]) == {"p1/rating"}
        assert {"fit", "training_mean", "ridge"} <= set(found["overall"])
        saved = archive.read_tree(out).to_dataset()
        assert float(saved["r2"].sel(stream="p1/rating", predictor="fit")) == found["streams"]["p1/rating"]["fit"]["r2"]

    def test_evaluate_a_fit(self, work):
        words = ("evaluate", work / "rec.nc", "--fit", work / "fit.nc", "--run", "run-2", "-t", "p1/rating")
        done = run(*words, "--training", work / "rec.nc", "--training-run", "run-1")
        assert done.exit_code == 0, done.stderr
        assert "held-out R2" in done.stdout
        assert done.stdout.count("*") >= 3
        assert "--fit needs --training" in problem(*words)
        assert "is not what" in problem(*words, "--training", work / "rec.nc")

    def test_evaluate_a_fit_of_some_people(self, work):
        part = ("--participant", "p1", "--participant", "p2")
        answer("fit", work / "rec.nc", work / "two.nc", "-c", work / "fit.toml", "--run", "run-1", *part)
        words = ("evaluate", work / "rec.nc", "--fit", work / "two.nc", "--run", "run-2", "-t", "p1/rating", *part)
        found = answer(*words, "--training", work / "rec.nc", "--training-run", "run-1")
        assert set(found["streams"]) == {"p1/rating"}

    @pytest.mark.parametrize("what", ["responses", "latents", "loadings", "convergence"])
    def test_plot(self, work, what):
        out = work / f"{what}.png"
        words = ("plot", work / "fit.nc", out, "--what", what)
        assert answer(*words, "--modality", "rating") == {"picture": str(out), "what": what}
        if what == "latents":
            answer(*words, "--recording", work / "rec.nc", "--run", "run-2")
        assert out.read_bytes()[:4] == b"\x89PNG"

    def test_plot_a_prediction(self, work):
        run("predict", work / "fit.nc", work / "rec.nc", work / "p.nc", "-t", "p1/rating")
        words = ("plot", work / "p.nc", work / "p.svg", "--what", "prediction", "--recording", work / "rec.nc")
        answer(*words, "--run", "run-2")
        assert "svg" in (work / "p.svg").read_text()[:200]

    def test_doctor(self):
        done = run("doctor", "--no-probe", "--json")
        found = json.loads(done.stdout)
        assert {finding["topic"] for finding in found["findings"]} >= {"machine", "packages", "cores", "archive"}
        assert done.exit_code == int(any(finding["level"] == "error" for finding in found["findings"]))
        assert "ok    archive: written, sealed and read back" in run("doctor", "--no-probe").stdout


class TestGaussianProcess:
    def test_from_fit_to_picture(self, work):
        pytest.importorskip("jax")
        responses = ["responses.rating={family='Gaussian', width=0.6, lag=0.4}"]
        responses += ["responses.physiology={family='Gaussian', width=0.8, lag=1.0}"]
        words = ["fit", work / "rec.nc", work / "gp.nc", "--model", "GPMSRM", "-k", 2, "-s", "n_starts=1"]
        words += ["--modality", "rating", "--modality", "physiology", "--run", "run-1"]
        found = answer(*words, *[word for response in responses for word in ("-s", response)])
        fitted = msrm.open_fit(work / "gp.nc")
        assert (found["model"], found["objective"]) == ("GPMSRM", fitted.objective_)
        assert found["likelihood_error"] == fitted.likelihood_error_
        assert "likelihood: " in run("info", work / "gp.nc").stdout
        ask = ("predict", work / "gp.nc", work / "rec.nc", work / "gp-out.nc", "-t", "p1/rating")
        part = ("--modality", "rating", "--modality", "physiology", "--run", "run-2")
        variances = []
        for noise in ((), ("--noise",)):
            answer(*ask, *part, *noise)
            variances.append(archive.read_tree(work / "gp-out.nc")["p1/run-2/rating/variance"].values)
        assert (variances[1] > variances[0]).all()
        for what in ("responses", "latents", "convergence"):
            answer("plot", work / "gp.nc", work / "gp.png", "--what", what)
        assert "no variances" in problem(*ask[:1], work / "fit.nc", *ask[2:], "--noise")


@pytest.fixture(scope="module")
def drawn(work) -> list[object]:
    """A fit of one stream, and the words that sample it: eight draws of two chains are in `blocks-2`."""
    settings = "n_factors = 1\nn_starts = 1\ntol = 1e-2\n[responses.rating]\nfamily = 'Identity'\n"
    (work / "small.toml").write_text(settings)
    part = ["--modality", "rating", "--run", "run-1", "--participant", "p1"]
    answer("fit", work / "rec.nc", work / "small.nc", "-c", work / "small.toml", "--model", "GPMSRM", *part)
    words = ["sample", work / "small.nc", work / "rec.nc", work / "small-draws.nc", *part, "--chains", 2]
    words += ["--warmup", 4, "--draws", 8, "--jobs", 1]
    answer(*words, "--path", work / "blocks-2")
    return words


class TestSampling:
    def test_settings_give_the_draws_of_their_fit(self, drawn, work):
        draws = msrm.open_fit(work / "small-draws.nc")
        found = answer("info", work / "small-draws.nc")["draws"]
        assert (found["draws"], found["seed"], found["verdict"]) == (8, 0, draws.summary().verdict)
        answer(drawn[0], work / "small.toml", drawn[2], work / "again.nc", *drawn[4:])
        np.testing.assert_array_equal(msrm.open_fit(work / "again.nc").posterior["noise"], draws.posterior["noise"])

    def test_what_draws_answer(self, drawn, work):
        draws, picture, rec = work / "small-draws.nc", work / "d.png", work / "rec.nc"
        assert "NOT CONVERGED" in run("info", draws).stdout
        answer("predict", draws, rec, work / "g.nc", *drawn[4:10], "--noise")
        for what in ("responses", "latents", "loadings", "convergence", "traces", "ranks"):
            answer("plot", draws, picture, "--what", what)
        told = problem("plot", draws, picture, "--what", "traces", "--quantity", "lag")
        assert "no quantity 'lag'" in told
        assert "--what check needs --recording" in problem("plot", draws, picture, "--what", "check")

    def test_other_data_or_settings_than_the_fit_are_refused(self, drawn, work):
        refused = problem(*drawn[:4], "--run", "run-2")
        assert "not the one that was fitted (runs run-2 here, run-1 fitted" in refused
        assert "leave out --set" in problem(*drawn, "-s", "tol=1")

    def test_options_of_nuts_reach_it(self, drawn, monkeypatch):
        given = {}

        def sample(self, recording, **options):
            given.update(options)
            raise ValueError("enough")

        monkeypatch.setattr(msrm.GPMSRM, "sample", sample)
        own = ["--metric", "dense", "--chain-method", "processes", "--target-accept", 0.9, "--max-tree-depth", 7]
        assert problem(*drawn, "--sampler", "nuts", *own) == "msrm: enough\n"
        counts = {"sampler": "nuts", "chains": 2, "warmup": 4, "draws": 8, "seed": 0, "n_jobs": 1, "resume": False}
        settings = {"metric": "dense", "chain_method": "processes", "target_accept": 0.9, "max_tree_depth": 7}
        assert {name: value for name, value in given.items() if name != "path"} == counts | settings

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--metric", "dense", "--max-tree-depth", 4], "--metric, --max-tree-depth: no setting of --sampler gibbs"),
            (["--sampler", "nuts", "--target-accept", 1.5], "--target-accept must lie between 0 and 1, found 1.5"),
            (["--sampler", "nuts"], "--jobs: NUTS starts processes under --chain-method processes alone"),
            (["--chains", 0], "--chains must be an integer of at least 1, found 0"),
            (["--resume"], "--resume needs the path"),
        ],
    )
    def test_options_are_refused_before_anything_is_fitted(self, drawn, monkeypatch, options, told):
        monkeypatch.setattr(msrm.GPMSRM, "fit", lambda *_: pytest.fail("fitted first"))
        words = [drawn[0], str(drawn[1]).replace(".nc", ".toml"), *drawn[2:]]
        assert f"msrm: {told}" in problem(*words, *options)

    def test_a_folder_in_use_or_too_long_is_refused_in_options(self, drawn, work):
        assert "Continue it with --resume, give another path" in problem(*drawn, "--path", work / "blocks-2")
        longer = problem(*drawn, "--path", work / "blocks-2", "--resume", "--draws", 5)
        assert "holds 8 draws of a chain, more than --draws 5" in longer

    def test_info_of_blocks_and_what_it_says_to_type(self, drawn, work):
        blocks = work / "blocks-4"
        shutil.copytree(work / "blocks-2", blocks)
        found = answer("info", blocks)
        assert found["on_disk"] == [{"warmup": 4, "draws": 8}] * 2
        assert (found["sampler"], found["seed"], found["running"]) == ("gibbs", 0, False)
        assert found["recording_digest"] == msrm.open_fit(work / "small.nc").recording_digest_
        told = run("info", blocks).stdout
        assert "chain 1: warm-up 4 of 4, 8 draws" in told
        typed = shlex.split(told.splitlines()[-1].partition("RECORDING OUT ")[2])
        assert answer(*drawn[:3], work / "longer.nc", *drawn[4:10], *typed[:-1], 9, "--jobs", 1)["draws"] == 9
        longer, draws = (msrm.open_fit(work / name).posterior["noise"] for name in ("longer.nc", "small-draws.nc"))
        np.testing.assert_array_equal(longer[:, :8], draws)

    def test_folders_in_the_place_of_files(self, drawn, work):
        told = f"{work / 'blocks-2'} holds blocks of draws, not an archive of them; `msrm info"
        for words in (("sample", work / "blocks-2", *drawn[2:]), ("plot", work / "blocks-2", work / "x.png")):
            assert told in problem(*words)
        assert "is a folder; name an archive" in problem("predict", work, work / "rec.nc", work / "x.nc")
        assert f"--path {work / 'rec.nc'} is a file" in problem(*drawn, "--path", work / "rec.nc")
        shutil.copytree(work / "blocks-2" / "chain-00", work / "blocks-3" / "chain-00")
        assert "blocks-3 holds blocks of draws but not identity.json" in problem("info", work / "blocks-3")

    def test_ctrl_c_says_what_to_type(self, drawn, work, monkeypatch):
        report = chains._Chain.report

        def interrupted(self, *, force=False):
            if len(self.buffer) == 3:
                raise KeyboardInterrupt
            report(self, force=force)

        monkeypatch.setattr(chains._Chain, "report", interrupted)
        done = run(*drawn)
        assert done.exit_code == 130
        assert "sampling stopped with 3 draws of 1 chain in " in done.stderr
        typed = shlex.split(done.stderr.partition("continue with: ")[2])
        assert typed[: len(drawn) + 1] == ["msrm", *map(str, drawn)]
        assert typed[-3::2] == ["--path", "--resume"]
        monkeypatch.undo()
        assert answer(*typed[1:])["draws"] == 8
        shutil.rmtree(typed[-2])

    def test_ctrl_c_in_the_fit_draws_nothing(self, drawn, monkeypatch):
        fit = msrm.GPMSRM.fit

        def interrupted(self, recording):
            fit(self, recording).stop_reason_ = INTERRUPTED
            return self

        monkeypatch.setattr(msrm.GPMSRM, "fit", interrupted)
        monkeypatch.setattr(msrm.GPMSRM, "sample", lambda *_, **__: pytest.fail("sampled"))
        done = run(drawn[0], str(drawn[1]).replace(".nc", ".toml"), *drawn[2:])
        assert (done.exit_code, done.stderr) == (130, "msrm: interrupted in the fit before the first draw\n")

    def test_draws_survive_an_archive_that_cannot_be_written(self, drawn, work, monkeypatch):
        def full(self, path):
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr("msrm.gp.draws.Draws.save", full)
        told = problem(*drawn)
        assert "No space left on device" in told
        folder = shlex.split(told.partition("continue with: ")[2])[-2]
        assert DrawStore(Path(folder)).last_of(1).draws == 8
        shutil.rmtree(folder)

    def test_words_of_other_commands_stay(self):
        assert as_typed("seed=3, resume=True", ["fit"]) == "seed=3, resume=True"
        assert (
            as_typed('metric="dense" is too large: draws=5.', ["sample"]) == "--metric dense is too large: --draws 5."
        )


class TestSettings:
    def test_flags_win_over_set_over_file(self, work):
        assignments = ["n_factors=4", "seed=5", "responses.rating.width=0.9", "edges=extend"]
        settings, part = read_settings(work / "fit.toml", assignments, {"n_factors": 5, "seed": None})
        assert (settings["n_factors"], settings["seed"], settings["edges"], part) == (5, 5, "extend", {})
        estimator = estimator_of(settings)
        assert estimator.responses["rating"].width == 0.9
        assert estimator.responses["rating"].lag == msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.5, 1.0))

    def test_a_family_replaces_the_other_family(self, work):
        settings, _ = read_settings(work / "fit.toml", ["responses.rating={family='Identity'}"], {})
        assert estimator_of(settings).responses["rating"] == msrm.Identity()

    def test_the_settings_of_the_docs(self, tmp_path):
        pytest.importorskip("jax")
        page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
        blocks = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        models = [block for block in blocks if "n_factors" in block]
        assert len(models) == 2
        for block in models:
            (tmp_path / "fit.toml").write_text(block)
            assert estimator_of(read_settings(tmp_path / "fit.toml", None, {})[0]).n_factors == 3

    def test_arguments_of_gp_msrm(self):
        pytest.importorskip("jax")
        assignments = ["model=GPMSRM", "n_factors=2", "responses.x.family=Identity", "priors.loading_sd=0.5"]
        assignments += ["length_scale={start=3, bounds=[1, 9]}", "priors.noise={family='LogNormal', mean=-1.0, sd=0.5}"]
        estimator = estimator_of(read_settings(None, assignments, {})[0])
        assert estimator.length_scale == msrm.Free(3, bounds=(1, 9))
        assert estimator.priors == msrm.Priors(noise=msrm.LogNormal(-1.0, 0.5), loading_sd=0.5)

    def test_the_recording_table_selects(self, work):
        (work / "part.toml").write_text(TOML + "\n[recording]\nruns = ['run-2']\nparticipants = ['p1', 'p3']\n")
        answer("fit", work / "rec.nc", work / "part.nc", "-c", work / "part.toml")
        assert set(archive.read_tree(work / "part.nc")["parameters/loading"].children) == {"p1", "p3"}

    @pytest.mark.parametrize(
        ("assignments", "message"),
        [
            (["n_factor=3"], r"^--set n_factor=3: 'n_factor' is unknown to RMSRM; it has .*n_factors.*recording"),
            (["seed"], r"--set seed: wanted NAME=VALUE"),
            (["responses.rating.family=Gauss"], r"responses\.rating\.family must be one of"),
            (["recording=3"], "'recording' must be a table"),
            (["model=PCA"], "model must be one of RMSRM, GPMSRM, found 'PCA'"),
            (["model=GPMSRM"], "'latent_step' is unknown to GPMSRM; it has .*length_scale"),
        ],
    )
    def test_wrong_settings_are_named(self, work, assignments, message):
        with pytest.raises(ValueError, match=message):
            estimator_of(read_settings(work / "fit.toml", assignments, {})[0])

    def test_toml_errors_name_file_and_place(self, work):
        (work / "bad.toml").write_text("n_factors = \n")
        with pytest.raises(ValueError, match=r"bad\.toml: .*line 1"):
            read_settings(work / "bad.toml", None, {})


class TestProblems:
    def test_in_one_line_with_exit_code_1(self, work):
        assert "nothere.nc: no such file" in problem("info", work / "nothere.nc")
        assert "name the BIDS task" in problem("info", work)
        rec, fit = work / "rec.nc", work / "fit.nc"
        assert "No run 'run-9'; there are run-1, run-2" in problem(
            "fit", rec, work / "x.nc", "-c", work / "fit.toml", "--run", "run-9"
        )
        assert "give each modality a table" in problem("fit", rec, work / "x.nc")
        assert "wanted PARTICIPANT/MODALITY" in problem("predict", fit, rec, work / "x.nc", "-t", "rating")
        assert "holds a 'Truth', not a fitted model" in problem("predict", work / "truth.nc", rec, work / "x.nc")
        assert "needs --recording" in problem("plot", fit, work / "x.png", "--what", "prediction")
        assert "leave out --config" in problem("evaluate", rec, "--fit", fit, "-c", work / "fit.toml")
        assert (
            problem("fit", rec, work / "x.nc", "-c", work / "no.toml")
            == f"msrm: {work / 'no.toml'}: no such settings file\n"
        )
        assert problem("fit", work / "no.nc", work / "x.nc", "-c", work / "fit.toml").endswith(
            "no.nc: no such file or folder\n"
        )
        assert "Errno" not in problem("predict", work / "no.nc", rec, work / "x.nc")
        assert "--what traces needs draws; make them with msrm sample" in problem(
            "plot", fit, work / "x.png", "--what", "traces"
        )
        assert "only a GPMSRM fit can be sampled" in problem("sample", fit, rec, work / "x.nc")
        assert "no folder" in problem("simulate", work / "no" / "x.nc", "--seconds", 30).lower()

    def test_where_nothing_can_be_written_is_told_before_the_work(self, work, monkeypatch):
        monkeypatch.setattr(msrm.RMSRM, "fit", lambda *_: pytest.fail("fitted first"))
        fit = ("fit", work / "rec.nc")
        assert "There is no folder" in problem(*fit, work / "no" / "x.nc", "-c", work / "fit.toml")
        assert "it is a folder" in problem(*fit, work, "-c", work / "fit.toml")

    @pytest.mark.parametrize("name", ["a.xyz", "a"])
    def test_an_unknown_picture_format(self, work, name):
        told = problem("plot", work / "fit.nc", work / name)
        assert f"{name}: end its name in .png, .pdf or .svg" in told
        assert not list(work.glob("a.*"))

    def test_a_damaged_fit(self, work):
        damaged = bytearray((work / "fit.nc").read_bytes())
        damaged[len(damaged) // 2] ^= 4
        (work / "damaged.nc").write_bytes(damaged)
        assert "damaged" in problem("info", work / "damaged.nc")
        assert "damaged" in problem("predict", work / "damaged.nc", work / "rec.nc", work / "x.nc")

    def test_a_malformed_command_line(self, work):
        assert run("fit", work / "rec.nc").exit_code == 2
        assert run("nonsense").exit_code == 2

    def test_a_bug_is_not_hidden(self, monkeypatch):
        monkeypatch.setattr("msrm.cli.work.doctor", lambda probe: {}["missing"])
        assert isinstance(run("doctor").exception, KeyError)

    def test_ctrl_c_ends_with_130(self):
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs of a shell ignore it
            "from msrm import cli\n"
            "from msrm.cli import work\n"
            "work.doctor = lambda probe: (print('ready', flush=True), time.sleep(60))\n"
            "sys.argv = ['msrm', 'doctor']\n"
            "cli.main()\n"
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen([sys.executable, "-c", code], **pipes)
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=30)
        assert child.returncode == 130
        assert told == "msrm: interrupted\n"

    def test_ctrl_c_while_modules_load_ends_with_130(self):
        code = (
            "import sys\n"
            "class Slow:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'typer':\n"
            "            raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Slow())\n"
            "from msrm.cli import main\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, "msrm: interrupted\n")

    def test_warnings_take_one_line(self, capsys):
        commands._say_warning(UserWarning("two\nlines"), UserWarning, "file", 3)
        assert capsys.readouterr().err == "msrm: warning: two lines\n"
