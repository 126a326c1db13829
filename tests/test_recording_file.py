"""msrm.recording_file: what is written comes back bit for bit, in blocks, or is refused."""

import cProfile
import os
import pickle
import pstats
import signal
import subprocess
import sys
import textwrap
import warnings

import netCDF4
import numpy as np
import pytest
import xarray as xr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import msrm
from msrm import archive, recording_file
from msrm.intake import check_name
from msrm.recording import Recording, RecordingWarning
from msrm.recording_file import RecordingWriter
from msrm.stream import Stream, chunk_width

KEY = ("p1", "run-1", "brain")


def example(features: int = 5, rows: int = 40) -> Recording:
    rng = np.random.default_rng(1)
    brain = rng.standard_normal((rows, features))
    brain[3, 1:] = np.nan
    rating = rng.standard_normal((60, 2)).astype(np.float32)
    runs = {
        r: {"brain": (brain, np.arange(rows) * 1.8), "rating": (rating, np.arange(60) * 1.2)} for r in ("run-1", "2")
    }
    return Recording.from_dict({"p1": runs, "Zoë 2.0": runs})


def wide(rows: int = 2**16, features: int = 40) -> Recording:
    """Several chunks: 8 features each."""
    values = np.random.default_rng(2).standard_normal((rows, features))
    assert chunk_width(rows) == 8
    return Recording.from_dict({"p1": {"run-1": {"brain": (values, np.arange(rows) * 0.001)}}})


def assert_identical(first: Recording, second: Recording) -> None:
    assert [s.label for s in first.streams()] == [s.label for s in second.streams()]
    for a, b in zip(first.streams(), second.streams(), strict=True):
        assert a.times.tobytes() == b.times.tobytes()
        assert a.features.tolist() == b.features.tolist()
        assert a.data.dtype == b.data.dtype
        assert a.values.tobytes() == b.values.tobytes()


@pytest.fixture
def counted(monkeypatch):
    """How many values were fetched from disk or memory."""
    counts: list[int] = []
    original = Stream._fetch

    def fetch(self, start, stop):
        counts.append(self.n_times * (stop - start))
        return original(self, start, stop)

    monkeypatch.setattr(Stream, "_fetch", fetch)
    return counts


def write(path, streams) -> None:
    with RecordingWriter(path) as writer:
        for stream in streams:
            writer.add(*stream)


def names():
    def allowed(name: str) -> bool:
        try:
            return bool(check_name(name, "name"))
        except ValueError:
            return False

    awkward = st.sampled_from(
        ["1 p", "a.b", "é", "日本 語", "x" * 200, "_", "0", "a:b*c?", "values", "time", "a\\b", "½"]
    )
    return awkward | st.text(min_size=1, max_size=12).filter(allowed)


def floats(kind):
    return st.floats(allow_infinity=False, width=8 * np.dtype(kind).itemsize)


class TestRoundTrip:
    def test_bits_names_types_and_units(self, tmp_path):
        recording = example()
        recording.to_netcdf(tmp_path / "rec.nc")
        again = msrm.open_recording(tmp_path / "rec.nc")
        assert_identical(again, recording)
        assert again.digest() == recording.digest()
        assert repr(again) == repr(recording)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_any_names_times_and_values(self, data, tmp_path_factory):
        shape = data.draw(st.tuples(st.integers(2, 5), st.integers(1, 3)))
        kind = data.draw(st.sampled_from([np.float32, np.float64]))
        values = data.draw(hnp.arrays(kind, shape, elements=floats(kind)))
        times = np.sort(data.draw(hnp.arrays(float, shape[0], elements=st.floats(-1e12, 1e12), unique=True)))
        rows = np.isfinite(values).any(axis=1)
        assume((np.diff(times) > 0).all() and rows.sum() > 1)
        key = [data.draw(names()) for _ in range(3)]
        features = data.draw(
            st.lists(st.text("aé/ .1\n\t", min_size=1), min_size=shape[1], max_size=shape[1], unique=True)
        )
        array = xr.DataArray(values, {"time": times, "feature": features}, ("time", "feature"))
        path = tmp_path_factory.mktemp("names") / "rec.nc"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordingWarning)
            recording = Recording.from_dict({key[0]: {key[1]: {key[2]: array}}})
            recording.to_netcdf(path)
            again = msrm.open_recording(path)
        assert_identical(again, recording)
        leaf = xr.open_datatree(path)["/".join(key)]
        assert leaf["time"].dtype == np.float64
        assert leaf["time"].values.tobytes() == times.tobytes()

    def test_plain_xarray_reads_it(self, tmp_path):
        array = xr.DataArray(
            np.random.default_rng(0).standard_normal((7, 1)),
            {"time": np.arange(7) * 0.1},
            ("time", "feature"),
            attrs={"units": "seconds", "long_name": "reaction time"},
        )
        Recording.from_dict({"p1": {"r": {"rt": array}}}).to_netcdf(tmp_path / "rec.nc")
        with xr.open_datatree(tmp_path / "rec.nc") as tree:
            leaf = tree["p1/r/rt"]
            assert leaf["time"].dtype == leaf["values"].dtype == np.float64
            assert leaf["time"].values.tobytes() == (np.arange(7) * 0.1).tobytes()
            assert leaf["values"].attrs == {"units": "s", "long_name": "reaction time"}
            assert Recording(tree).has("p1", "r", "rt")

    def test_files_of_other_programs(self, tmp_path):
        recording = example()
        tree = recording.tree.copy(deep=True)
        tree["p1/run-1/brain"]["time"].attrs["units"] = "seconds"
        tree.to_netcdf(tmp_path / "other.nc")
        again = msrm.open_recording(tmp_path / "other.nc")
        assert again.digest() == recording.digest()
        again.to_netcdf(tmp_path / "rec.nc")
        assert msrm.open_recording(tmp_path / "rec.nc").digest() == recording.digest()


class TestLazy:
    def test_opening_reads_no_values(self, tmp_path, counted):
        recording = wide()
        recording.to_netcdf(tmp_path / "rec.nc")
        digest = recording.digest()
        counted.clear()
        again = msrm.open_recording(tmp_path / "rec.nc", verify=False)
        assert again.digest() == digest
        assert "40" in repr(again)
        assert again.select(runs="run-1").stream(*KEY).missing == 0
        assert counted == []
        assert not again.stream(*KEY).data.variable._in_memory

    def test_blocks_are_read_and_verified_once(self, tmp_path, counted):
        recording = wide()
        recording.to_netcdf(tmp_path / "rec.nc")
        stream = msrm.open_recording(tmp_path / "rec.nc").stream(*KEY)
        counted.clear()
        for where, block in stream.blocks(5):
            np.testing.assert_array_equal(block, recording.stream(*KEY).values[:, where])
        misaligned = sum(counted)
        counted.clear()
        list(stream.blocks(5))
        assert sum(counted) == recording.stream(*KEY).values.size < misaligned

    def test_values_lie_in_chunks_of_features(self, tmp_path):
        wide().to_netcdf(tmp_path / "rec.nc")
        with netCDF4.Dataset(tmp_path / "rec.nc") as file:
            assert file["p1/run-1/brain/values"].chunking() == [2**16, 8]

    def test_an_opened_recording_pickles(self, tmp_path):
        example().to_netcdf(tmp_path / "rec.nc")
        again = pickle.loads(pickle.dumps(msrm.open_recording(tmp_path / "rec.nc")))
        assert_identical(again, example())

    @pytest.mark.slow
    @pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
    def test_memory_stays_below_the_size_of_the_recording(self, tmp_path):
        program = """
            import sys, numpy as np, msrm
            from msrm.recording_file import RecordingWriter
            class Made:
                shape, ndim, dtype = (500, 200_000), 2, np.dtype(float)
                def __getitem__(self, key):
                    return np.random.default_rng(key[1].start).standard_normal((500, key[1].stop - key[1].start))
            with RecordingWriter(sys.argv[1]) as writer:
                for run in ("run-1", "run-2"):
                    writer.add("p1", run, "brain", Made(), np.arange(500) * 2.0)
            recording = msrm.open_recording(sys.argv[1])
            recording.verify()
            # getrusage would count what the parent had.
            print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), tmp_path / "rec.nc"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert os.path.getsize(tmp_path / "rec.nc") > 1.6e9
        assert float(done.stdout) / 1024 < 900  # MB: libraries take 200, a block of 64 MB has a few copies


class TestWriter:
    def test_a_memory_map_is_written_in_blocks(self, tmp_path, counted):
        recording = wide()
        np.save(tmp_path / "values.npy", recording.stream(*KEY).values)
        counted.clear()
        mapped = np.load(tmp_path / "values.npy", mmap_mode="r")
        with RecordingWriter(tmp_path / "rec.nc") as writer:
            writer.add(*KEY, mapped, recording.stream(*KEY).times)
        assert sum(counted) == mapped.size
        assert msrm.open_recording(tmp_path / "rec.nc").digest() == recording.digest()

    def test_what_from_dict_takes(self, tmp_path):
        recording = example()
        with RecordingWriter(tmp_path / "rec.nc") as writer:
            for stream in recording.streams():
                writer.add(stream.participant, stream.run, stream.modality, stream.data)
        assert msrm.open_recording(tmp_path / "rec.nc").digest() == recording.digest()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((*KEY, np.ones((4, 2)), np.arange(3.0)), r"values \(4, 2\) for 3 times and 2 features"),
            ((*KEY, np.ones((3, 2)), np.arange(3.0), ["a"]), r"values \(3, 2\) for 3 times and 1 features"),
            ((*KEY, np.ones((3, 2)), np.array([0.0, 2, 1])), "time must increase"),
            ((*KEY, np.full((3, 2), np.inf), np.arange(3.0)), "infinite values"),
            ((*KEY, np.full((3, 2), np.nan), np.arange(3.0)), "every entry is missing"),
            ((*KEY, np.array([["a"], ["b"]]), np.arange(2.0)), "values are <U1; wanted numbers"),
            (("p/1", *KEY[1:], np.ones((3, 2)), np.arange(3.0)), 'has a "/" in it'),
        ],
    )
    def test_refusals_leave_nothing(self, tmp_path, arguments, message):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "rec.nc", [arguments])
        assert os.listdir(tmp_path) == []

    def test_checks_between_streams_come_at_the_end(self, tmp_path):
        two, three = (("brain", np.eye(4)[:, :n], np.arange(4.0)) for n in (2, 3))
        for message, added in (
            ("2 features in run-1 and 3 in run-2", [("p1", "run-1", *two), ("p1", "run-2", *three)]),
            ("'brain' of p1 in run-1 is given twice", [("p1", "run-1", *two), ("p1", "run-1", *three)]),
            ("An empty recording: no stream was added", []),
        ):
            with pytest.raises(ValueError, match=message):
                write(tmp_path / "rec.nc", added)
        assert os.listdir(tmp_path) == []


class TestSaving:
    def test_a_failed_save_leaves_the_previous_file(self, tmp_path, monkeypatch):
        example().to_netcdf(tmp_path / "rec.nc")
        before = (tmp_path / "rec.nc").read_bytes()

        def full(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(recording_file, "_define", full)
        with pytest.raises(OSError, match="No space left"):
            example(7).to_netcdf(tmp_path / "rec.nc")
        assert (tmp_path / "rec.nc").read_bytes() == before
        assert os.listdir(tmp_path) == ["rec.nc"]

    def test_a_killed_save_leaves_the_previous_file(self, tmp_path):
        example().to_netcdf(tmp_path / "rec.nc")
        before = (tmp_path / "rec.nc").read_bytes()
        program = """
            import sys, time, numpy as np
            from msrm.recording_file import RecordingWriter
            with RecordingWriter(sys.argv[1]) as writer:
                writer.add("p1", "r", "m", np.eye(4), np.arange(4.0))
                print("writing", flush=True)
                time.sleep(60)
        """
        command = [sys.executable, "-c", textwrap.dedent(program), tmp_path / "rec.nc"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "writing\n"
            process.send_signal(signal.SIGKILL)
        assert (tmp_path / "rec.nc").read_bytes() == before

    def test_over_the_file_it_is_read_from(self, tmp_path):
        path = tmp_path / "rec.nc"
        example().to_netcdf(path)
        opened = msrm.open_recording(path)
        opened.select(runs="2").to_netcdf(path)
        assert msrm.open_recording(path).runs == ("2",)
        assert_identical(opened, example())

    def test_a_file_that_was_replaced_is_noticed(self, tmp_path):
        path = tmp_path / "rec.nc"
        wide().to_netcdf(path)
        opened = pickle.dumps(msrm.open_recording(path))
        values = np.zeros((2**16, 40))
        values[0] = 1.0
        Recording.from_dict({"p1": {"run-1": {"brain": (values, np.arange(2**16) * 0.001)}}}).to_netcdf(path)
        with pytest.raises(ValueError, match=r"'brain' of p1 in run-1: .* was replaced \(features 0 to 7 changed\)"):
            pickle.loads(opened).verify()

    def test_a_file_overwritten_in_place_is_opened_anew(self, tmp_path):
        path = tmp_path / "rec.nc"
        example().to_netcdf(path)
        opened = msrm.open_recording(path)
        wide().to_netcdf(tmp_path / "new.nc")
        path.write_bytes((tmp_path / "new.nc").read_bytes())
        assert_identical(msrm.open_recording(path), wide())
        with pytest.raises(ValueError, match=r"'brain' of p1 in run-1: .* damaged or was replaced"):
            opened.verify()

    def test_where_there_is_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            example().to_netcdf(tmp_path / "no" / "rec.nc")


class TestDamage:
    def test_truncation_is_refused_at_every_length(self, tmp_path):
        example().to_netcdf(tmp_path / "rec.nc")
        content = (tmp_path / "rec.nc").read_bytes()
        lengths = [
            0,
            1,
            8,
            100,
            *np.linspace(200, len(content) - 1, 60, dtype=int),
            *range(len(content) - 100, len(content)),
        ]
        for length in lengths:
            (tmp_path / "cut.nc").write_bytes(content[:length])
            for verify in (None, False):
                with pytest.raises(ValueError, match="truncated"):
                    msrm.open_recording(tmp_path / "cut.nc", verify=verify)

    def test_a_changed_byte_is_refused_at_opening(self, tmp_path):
        example().to_netcdf(tmp_path / "rec.nc")
        content = bytearray((tmp_path / "rec.nc").read_bytes())
        for position in np.linspace(0, len(content) - 1, 300, dtype=int):
            content[position] ^= 4
            (tmp_path / "bad.nc").write_bytes(content)
            with pytest.raises(ValueError, match=r"bad\.nc"):
                msrm.open_recording(tmp_path / "bad.nc")
            content[position] ^= 4

    def test_a_changed_byte_in_a_large_file_never_gives_other_numbers(self, tmp_path):
        """Without the whole file's checksum: refused when opened or read, or without effect; in a child process."""
        program = """
            import sys, warnings, numpy as np, msrm
            warnings.simplefilter("ignore")
            path, folder = sys.argv[1:]
            expected = msrm.open_recording(path)
            values = [s.values for s in expected.streams()]
            content = bytearray(open(path, "rb").read())
            refused = 0
            for position in np.random.default_rng(0).integers(0, len(content), 60):
                content[position] ^= 1 << int(position) % 8
                bad = f"{folder}/{position}.nc"
                open(bad, "wb").write(content)
                content[position] ^= 1 << int(position) % 8
                try:
                    recording = msrm.open_recording(bad, verify=False)
                    found = [s.values for s in recording.streams()]
                except ValueError:
                    refused += 1
                    continue
                assert recording.digest() == expected.digest(), position
                assert all(a.tobytes() == b.tobytes() for a, b in zip(found, values, strict=True)), position
                assert [s.label for s in recording.streams()] == [s.label for s in expected.streams()], position
            print(refused)
        """
        example(60, 200).to_netcdf(tmp_path / "rec.nc")
        command = [sys.executable, "-c", textwrap.dedent(program), tmp_path / "rec.nc", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 30

    def test_damage_in_values_names_the_stream(self, tmp_path):
        recording = wide()
        recording.to_netcdf(tmp_path / "rec.nc")
        content = bytearray((tmp_path / "rec.nc").read_bytes())
        where = content.find(recording.stream(*KEY).values[1234, 16:24].tobytes())
        content[where] ^= 1
        (tmp_path / "rec.nc").write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            msrm.open_recording(tmp_path / "rec.nc")
        opened = msrm.open_recording(tmp_path / "rec.nc", verify=False)
        with pytest.raises(ValueError, match="'brain' of p1 in run-1: the file it is read from is damaged"):
            opened.verify()

    def test_changed_by_another_program(self, tmp_path):
        example().to_netcdf(tmp_path / "rec.nc")
        with netCDF4.Dataset(tmp_path / "rec.nc", "a") as file:
            file["p1/run-1/brain/values"][0, 0] = 5.0
        with pytest.raises(ValueError, match=r"truncated or changed since it was written|damaged"):
            msrm.open_recording(tmp_path / "rec.nc")

    def test_what_is_no_recording(self, tmp_path):
        (tmp_path / "text.nc").write_text("participant,run\n")
        with pytest.raises(ValueError, match="is not a readable netCDF-4 file"):
            msrm.open_recording(tmp_path / "text.nc")
        with pytest.raises(FileNotFoundError):
            msrm.open_recording(tmp_path / "none.nc")
        archive.write_tree(xr.DataTree(xr.Dataset({"x": 1.0})), tmp_path / "fit.nc", kind="RMSRM")
        with pytest.raises(ValueError, match="holds a RMSRM, not a recording; open it with"):
            msrm.open_recording(tmp_path / "fit.nc")
        example().to_netcdf(tmp_path / "rec.nc")
        with pytest.raises(ValueError, match="holds a 'recording', not a fitted model"):
            msrm.open_fit(tmp_path / "rec.nc")
        example().tree.to_netcdf(tmp_path / "other.nc")
        with pytest.raises(ValueError, match="has no checksum to verify"):
            msrm.open_recording(tmp_path / "other.nc", verify=True)


def test_the_work_of_opening_grows_with_the_streams_and_no_faster(tmp_path):
    stream = (np.random.default_rng(0).standard_normal((20, 3)), np.arange(20.0))

    def calls(participants):
        data = {f"p{i}": {f"run-{r}": {m: stream for m in "abc"} for r in range(4)} for i in range(participants)}
        path = tmp_path / f"{participants}.nc"
        Recording.from_dict(data).to_netcdf(path)
        with cProfile.Profile() as profile:
            assert len(msrm.open_recording(path).streams()) == 12 * participants
        return pstats.Stats(profile).total_calls

    calls(1)  # imports are nobody's growth
    few, many = calls(2), calls(10)
    assert many < 5.5 * few
