"""Recordings, their streams and what users give for them: what is kept, what is refused, what is warned about."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import msrm
from msrm.recording import Recording, RecordingWarning, Stream
from msrm.stream import chunk_width, make_stream

TIMES = np.arange(6) * 0.5


def values(features: int = 2, rows: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, features))


def one(value, participant="p1", run="run-1", modality="rating") -> Recording:
    return Recording.from_dict({participant: {run: {modality: value}}})


def several() -> Recording:
    """Three participants, two runs, names out of alphabetical order."""
    return Recording.from_dict(
        {
            p: {r: {m: (values(f, seed=i), TIMES) for i, (m, f) in enumerate({"z": 3, "a": 1}.items())} for r in "ba"}
            for p in ("p2", "p1", "p10")
        }
    )


class TestInputs:
    def test_every_kind_gives_the_same_stream(self):
        data = values()
        array = xr.DataArray(data, {"time": TIMES, "feature": ["x", "y"]}, ("time", "feature"))
        frame = pd.DataFrame(data, index=TIMES, columns=["x", "y"])
        digests = {one(v).digest() for v in (array, array.transpose(), frame, Recording.stream(one(array), *KEY))}
        assert len(digests) == 1

    def test_pair_numbers_its_features(self):
        stream = one((values(), TIMES)).stream(*KEY)
        np.testing.assert_array_equal(stream.values, values())
        np.testing.assert_array_equal(stream.times, TIMES)
        assert stream.features.tolist() == ["0", "1"]
        assert (stream.n_times, stream.n_features) == (6, 2)

    def test_one_dimensional_values_are_one_feature(self):
        column = values()[:, 0]
        array = xr.DataArray(column, {"time": TIMES}, ("time",), name="scr")
        for value, name in (
            ((column, TIMES), "0"),
            (pd.Series(column, TIMES, name="scr"), "scr"),
            (array, "scr"),
            (pd.Series(column, TIMES), "0"),
        ):
            stream = one(value).stream(*KEY)
            np.testing.assert_array_equal(stream.values, column[:, None])
            assert stream.features.tolist() == [name]

    @pytest.mark.parametrize(
        "kept", [[1, 2, None, 4, 5, 6], [1.5, np.nan, 2, 3, 4, pd.NA], pd.array([1, None, 3, 4, 5, 6], dtype="Int64")]
    )
    def test_missing_python_and_pandas_numbers_are_nan(self, kept):
        frame = pd.DataFrame({"x": pd.Series(kept, index=TIMES), "n": pd.Series(range(6), index=TIMES)})
        stream = one(frame).stream(*KEY)
        expected = [np.nan if pd.isna(v) else float(v) for v in kept]
        np.testing.assert_array_equal(stream.values[:, 0], expected)

    def test_integers_and_booleans_become_float64(self):
        for dtype in (np.int16, np.uint8, bool, np.float16):
            data = np.array([[0, 1]] * 3 + [[1, 0]] * 3, dtype=dtype)
            stream = one((data, TIMES)).stream(*KEY)
            assert stream.data.dtype == np.float64
            np.testing.assert_array_equal(stream.values, data.astype(float))

    def test_float32_is_kept_and_read_as_float64(self):
        data = values().astype(np.float32)
        stream = one((data, TIMES)).stream(*KEY)
        assert stream.data.dtype == np.float32
        assert stream.values.dtype == np.float64
        np.testing.assert_array_equal(stream.values, data)
        assert one((data, TIMES)).digest() == one((data.astype(float), TIMES)).digest()

    def test_read_only_values_are_not_copied_and_none_can_be_written(self):
        data = values()
        data.flags.writeable = False
        stream = one((data, TIMES)).stream(*KEY)
        assert np.shares_memory(stream.values, data)
        with pytest.raises(ValueError, match="read-only"):
            stream.values[0, 0] = 1.0
        with pytest.raises(ValueError, match="read-only"):
            stream.times[0] = 1.0

    def test_tree_is_read_back(self):
        recording = several()
        again = Recording(recording.tree)
        assert again.digest() == recording.digest()
        assert recording.tree["p1/a/z"]["values"].dims == ("time", "feature")
        assert recording.tree["p1/a/z"]["time"].attrs["units"] == "s"

    def test_decoding_units_are_spelled_so_that_xarray_leaves_them(self):
        array = xr.DataArray(
            values(), {"time": TIMES}, ("time", "feature"), attrs={"units": "seconds", "scale_factor": 2}
        )
        assert one(array).stream(*KEY).data.attrs == {"units": "s"}


KEY = ("p1", "run-1", "rating")
BAD = values()


def changed(index, value) -> np.ndarray:
    array = values()
    array[index] = value
    return array


def dated(unit) -> xr.DataArray:
    return xr.DataArray(values(), {"time": ("time", TIMES, {"units": unit})}, ("time", "feature"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (
                (values(), TIMES[[0, 1, 2, 4, 3, 5]]),
                ValueError,
                r"row 4 is 1.5 s after 2 s. Sort the rows or drop row 4",
            ),
            ((values(), TIMES[[0, 1, 2, 2, 4, 5]]), ValueError, r"rows 2 and 3 are both at 1 s. Drop one"),
            ((values(), np.where(TIMES == 1, np.nan, TIMES)), ValueError, r"time of row 2 is nan"),
            ((values(), np.where(TIMES == 1, np.inf, TIMES)), ValueError, r"time of row 2 is inf"),
            ((changed((3, 1), np.inf), TIMES), ValueError, r"1 infinite values, the first at 1.5 s in feature '1'"),
            ((changed((3, 1), -np.inf), TIMES), ValueError, r"infinite values"),
            ((np.full((6, 2), np.nan), TIMES), ValueError, r"'rating' of p1 in run-1: every entry is missing"),
            ((values(), TIMES[:5]), ValueError, r"values of shape \(6, 2\) do not fit times of shape \(5,\)"),
            ((values()[:, :, None], TIMES), TypeError, r"got ndarray of shape \(6, 2, 1\)"),
            (values(), TypeError, r"expected a DataArray .* got ndarray of shape \(6, 2\)"),
            ((np.empty((0, 2)), np.empty(0)), ValueError, r"0 rows and 2 features"),
            ((np.empty((6, 0)), TIMES), ValueError, r"6 rows and 0 features"),
            ((values() * 1j, TIMES), ValueError, r"row 0 of feature '0' is .*j.*; wanted a real number"),
            ((values().astype(str), TIMES), ValueError, r"row 0 of feature '0' is '.*'; wanted a real number"),
            (
                pd.DataFrame({"good": np.arange(6.0), "mood": [1, 2, "calm", 4, 5, 6]}, TIMES),
                ValueError,
                r"row 2 of feature 'mood' is 'calm'",
            ),
            ((values(), TIMES.astype(str)), ValueError, r"times are <U\d+, the first '0.0'; wanted seconds as numbers"),
            ((values(), pd.to_datetime(TIMES, unit="s")), ValueError, r"times are datetime64.* wanted seconds"),
            ((values(), pd.to_timedelta(TIMES, unit="s")), ValueError, r"times are timedelta64.* wanted seconds"),
            (xr.DataArray(values(), dims=("time", "feature")), ValueError, r"no coordinate 'time'"),
            (xr.DataArray(values(), dims=("time", "voxel")), ValueError, r"dimensions \('time', 'voxel'\); wanted"),
            (dated("ms"), ValueError, r"time is in 'ms'; convert it to seconds"),
            (
                pd.DataFrame(values(), TIMES, ["x", "x"]),
                ValueError,
                r"1 feature names occur more than once, such as 'x'",
            ),
            (pd.DataFrame(values(), TIMES, ["x", ""]), ValueError, r"name of feature 1 is ''"),
        ],
    )
    def test_streams(self, value, error, message):
        with pytest.raises(error, match=message):
            one(value)

    @pytest.mark.parametrize("unit", ["s", "sec", "Seconds", " s "])
    def test_units_that_are_seconds(self, unit):
        np.testing.assert_array_equal(one(dated(unit)).stream(*KEY).times, TIMES)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("a/b", 'has a "/" in it'),
            ("", "is empty"),
            (" a", "has spaces around it"),
            ("a\n", "has spaces around it"),
            ("a\tb", "has control characters"),
            (".a", r"starts with '\.'"),
            ("-a", "starts with '-'"),
            ("cafe\u0301", "composed form"),
            ("a" * 201, "longer than 200 bytes"),
        ],
    )
    @pytest.mark.parametrize("kind", ["participant", "run", "modality"])
    def test_names_that_no_archive_keeps(self, name, reason, kind):
        with pytest.raises(ValueError, match=f"The name of {kind} .*{reason}"):
            one((values(), TIMES), **{kind: name})

    def test_names_that_are_not_text(self):
        with pytest.raises(TypeError, match="run 1 is a int, not text; use '1'"):
            one((values(), TIMES), run=1)

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            ({}, ValueError, "An empty recording: the recording has nothing in it"),
            ({"p1": {}}, ValueError, "participant 'p1' has nothing in it"),
            ({"p1": {"run-1": {}}}, ValueError, "'run-1' of participant 'p1' has nothing in it"),
            ({"p1": (values(), TIMES)}, TypeError, "participant 'p1' is a tuple"),
            ([1], TypeError, "the recording is a list"),
        ],
    )
    def test_nesting(self, data, error, message):
        with pytest.raises(error, match=message):
            Recording.from_dict(data)

    def test_tree_without_recording(self):
        dataset = xr.Dataset({"values": (("time", "feature"), values())}, {"time": TIMES})
        with pytest.raises(ValueError, match="An empty recording: no stream"):
            Recording(xr.DataTree())
        with pytest.raises(ValueError, match="Data at '/p1/run-1'; a recording has them in groups"):
            Recording(xr.DataTree.from_dict({"p1/run-1": dataset}))
        two = dataset.rename(values="x").assign(y=dataset["values"])
        with pytest.raises(ValueError, match=r"'m' of p1 in r: no variable 'values'.*found x, y"):
            Recording(xr.DataTree.from_dict({"p1/r/m": two}))
        assert Recording(xr.DataTree.from_dict({"p1/r/m": dataset.rename(values="x")})).has("p1", "r", "m")

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ((values(3), TIMES), "'rating' of p1 has 2 features in run-1 and 3 in run-2"),
            (
                pd.DataFrame(values(), TIMES, ["0", "b"]),
                r"feature 1 is '1' in run-1 and 'b' in run-2 \(1 names differ\)",
            ),
        ],
    )
    def test_features_that_differ_between_runs(self, second, message):
        with pytest.raises(ValueError, match=message):
            Recording.from_dict({"p1": {"run-1": {"rating": (values(), TIMES)}, "run-2": {"rating": second}}})

    def test_features_may_differ_between_participants(self):
        data = {f"p{n}": {"run-1": {"rating": (values(n), TIMES)}} for n in (2, 3)}
        assert [len(Recording.from_dict(data).features(p, "rating")) for p in data] == [2, 3]

    def test_run_without_duration(self):
        lonely = np.full((6, 1), np.nan)
        lonely[2] = 1.0
        with pytest.raises(ValueError, match="run-1: all observed rows are at 1 s, so the run has no duration"):
            one((lonely, TIMES))
        with pytest.warns(RecordingWarning, match="constant"):
            Recording.from_dict({"p1": {"run-1": {"a": (lonely, TIMES), "b": (values(), TIMES)}}})

    def test_streams_of_a_run_that_share_no_time(self):
        data = {"p1": {"run-1": {"a": (values(), TIMES), "b": (values(), TIMES + 100), "c": (values(), TIMES + 2)}}}
        with pytest.raises(
            ValueError, match=r"run-1: 'c' of p1 spans 2 to 4.5 s, 'b' of p1 spans 100 to 102.5 s: they share no time"
        ):
            Recording.from_dict(data)
        data["p1"]["run-1"]["b"] = (values(), TIMES + 4.5)
        assert Recording.from_dict(data).modalities == ("a", "b", "c")

    def test_stream_given_twice(self):
        stream = make_stream(*KEY, (values(), TIMES))
        with pytest.raises(ValueError, match="'rating' of p1 in run-1 is given twice"):
            Recording.from_streams([stream, make_stream(*KEY, stream)])


class TestWarnings:
    def test_constant_and_missing_features_are_counted(self):
        def data(runs=1):
            array = np.random.default_rng(3).standard_normal((runs, 6, 9))
            array[..., 1:8] = 5.0
            array[..., 8] = np.nan
            return {f"run-{r}": {"rating": (array[r], TIMES)} for r in range(runs)}

        with pytest.warns(RecordingWarning) as caught:
            recording = Recording.from_dict({"p1": data(2), "p2": {**data(2)}})
        messages = [str(w.message) for w in caught]
        assert messages == [
            "2 features are missing in all runs: 1 in 'rating' of p1 (8); 1 in 'rating' of p2 (8)",
            "14 features are constant over all runs: 7 in 'rating' of p1 (1, 2, 3, 4, 5 and 2 more); "
            "7 in 'rating' of p2 (1, 2, 3, 4, 5 and 2 more)",
        ]
        assert all(w.filename == __file__ for w in caught)
        assert recording.features("p1", "rating").size == 9
        assert np.isnan(recording.stream("p1", "run-0", "rating").values[:, 8]).all()

    def test_constant_within_each_run_is_not_constant_over_all(self):
        runs = {f"run-{r}": {"a": (np.full(6, float(r)), TIMES), "b": (values(), TIMES)} for r in range(2)}
        Recording.from_dict({"p1": runs})

    def test_absent_runs_and_modalities_are_counted(self):
        full = {r: {m: (values(), TIMES) for m in "ab"} for r in ("run-1", "run-2", "run-3")}
        thin = {"run-1": full["run-1"], "run-2": {"a": full["run-2"]["a"]}}
        with pytest.warns(RecordingWarning) as caught:
            recording = Recording.from_dict({"p1": full, "p2": thin})
        assert [str(w.message) for w in caught] == [
            "1 participant is without some runs: p2 lacks run-3",
            "1 run of a participant is without some modalities: p2 in run-2 lacks b",
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recording.select(participants="p2")

    def test_a_modality_that_a_participant_never_has_is_no_accident(self):
        Recording.from_dict(
            {"p1": {"r": {"a": (values(), TIMES), "b": (values(), TIMES)}}, "p2": {"r": {"a": (values(), TIMES)}}}
        )

    @pytest.mark.parametrize(
        ("times", "other", "message"),
        [
            (
                np.arange(300) * 1000.0,
                None,
                "'a' of p1 in r: a sample every 1000 s for 299000 s: do the times count milli",
            ),
            (np.arange(300) * 10.0, np.arange(10) * 0.3, "do the times count milliseconds"),
            (np.arange(250.0), np.arange(250) * 1.8, r"times are 0, 1, ... 249 s while .* last 448.2 s: .* samples"),
            (np.arange(1.0, 4001.0), np.arange(200) * 2.0, "do the times count samples"),
        ],
    )
    def test_clocks_that_are_hardly_seconds(self, times, other, message):
        streams = {"a": (values(2, len(times)), times)}
        if other is not None:
            streams["b"] = (values(2, len(other)), other)
        with pytest.warns(RecordingWarning, match=message):
            Recording.from_dict({"p1": {"r": streams}})

    def test_one_sample_a_second_is_fine(self):
        streams = {"a": (values(2, 400), np.arange(400.0)), "b": (values(2, 200), np.arange(200) * 2.0)}
        Recording.from_dict({"p1": {"r": streams}})
        one((values(2, 400), np.arange(400.0)))


class TestAccess:
    def test_names_in_order_of_first_appearance(self):
        recording = several()
        assert recording.participants == ("p2", "p1", "p10")
        assert recording.runs == ("b", "a")
        assert recording.modalities == ("z", "a")
        assert recording.pairs[:3] == (("p2", "z"), ("p2", "a"), ("p1", "z"))
        keys = [(s.participant, s.run, s.modality) for s in recording.streams()]
        assert keys == [(p, r, m) for p in recording.participants for r in recording.runs for m in recording.modalities]

    @pytest.mark.filterwarnings("ignore::msrm.recording.RecordingWarning")
    def test_order_is_stable_however_streams_arrive(self):
        rng = np.random.default_rng(0)
        everything = list(several().streams())
        for _ in range(20):
            chosen = [everything[i] for i in rng.permutation(len(everything))[:7]]
            recording = Recording.from_streams(chosen)
            again = Recording.from_streams(recording.streams())
            assert [s.label for s in again.streams()] == [s.label for s in recording.streams()]
            assert recording.participants == tuple(dict.fromkeys(s.participant for s in chosen))

    def test_streams_by_name(self):
        recording = several()
        assert [s.modality for s in recording.streams("p1", "a")] == ["z", "a"]
        assert len(recording.streams(modality="z")) == 6
        assert recording.streams("nobody") == ()
        assert recording.has("p1", "a", "z")
        assert not recording.has("p1", "a", "y")
        assert recording.stream("p1", "a", "z") is recording.streams("p1", "a", "z")[0]

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            (("p3", "a", "z"), "No participant 'p3'; there are p2, p1, p10"),
            (("p1", "c", "z"), "No run 'c'; there are b, a"),
            (("p1", "a", "y"), "No modality 'y'; there are z, a"),
        ],
    )
    def test_stream_that_is_not_there(self, key, message):
        with pytest.raises(ValueError, match=message):
            several().stream(*key)

    def test_stream_that_only_others_have(self):
        recording = several().drop(targets={"p1": "z"})
        with pytest.raises(ValueError, match="Participant p1 has no 'z' in a; it has b/a, a/a"):
            recording.stream("p1", "a", "z")
        with pytest.raises(ValueError, match="Participant 'p1' has no modality 'z'; there are p2/z"):
            recording.features("p1", "z")

    def test_select(self):
        part = several().select(participants=["p10", "p2"], runs="a")
        assert (part.participants, part.runs, part.modalities) == (("p2", "p10"), ("a",), ("z", "a"))
        with pytest.raises(ValueError, match="No run 'x'; there are b, a"):
            several().select(runs=["a", "x"])
        with pytest.raises(ValueError, match="Nothing is left to select"):
            several().select(runs=[])

    def test_drop(self):
        assert several().drop(participants="p1", runs=["b"]).participants == ("p2", "p10")
        assert several().drop(modalities="z").modalities == ("a",)
        part = several().drop(targets={"p1": ["z"], "p2": "a"})
        assert [pair for pair in several().pairs if pair not in part.pairs] == [("p2", "a"), ("p1", "z")]
        with pytest.raises(ValueError, match="No modality 'y'"):
            several().drop(modalities="y")
        with pytest.raises(ValueError, match="'p9' has no modality 'z'"):
            several().drop(targets={"p9": "z"})
        with pytest.raises(ValueError, match="Nothing is left to drop"):
            several().drop(runs=["a", "b"])

    def test_a_part_must_keep_some_duration(self):
        data = {"p1": {"r": {"a": (values(2, 1), TIMES[:1]), "b": (values(), TIMES)}}}
        with pytest.warns(RecordingWarning, match="constant"):
            recording = Recording.from_dict(data)
        with pytest.raises(ValueError, match="the run has no duration"):
            recording.select(modalities="a")

    def test_parts_without_common_time_are_allowed(self):
        data = {m: (values(), TIMES + start) for m, start in {"a": 0, "b": 2, "c": 4}.items()}
        assert Recording.from_dict({"p1": {"r": data}}).drop(modalities="b").modalities == ("a", "c")


class TestStream:
    def test_blocks_cover_the_values(self):
        stream = one((values(7), TIMES)).stream(*KEY)
        for size in (None, 1, 3, 7, 100):
            blocks = list(stream.blocks(size))
            np.testing.assert_array_equal(np.hstack([block for _, block in blocks]), stream.values)
            np.testing.assert_array_equal(np.hstack([stream.features[where] for where, _ in blocks]), stream.features)
            assert all(block.shape[1] <= (size or 7) for _, block in blocks)
        with pytest.raises(ValueError, match="at least one feature, got size=0"):
            next(stream.blocks(0))

    def test_summary(self):
        data = values(3)
        data[1] = np.nan
        data[4, 2] = np.nan
        stream = one((data, TIMES)).stream(*KEY)
        assert stream.summary.observed.tolist() == [5, 5, 4]
        assert stream.summary.row_observed.tolist() == [3, 0, 3, 3, 2, 3]
        np.testing.assert_array_equal(stream.summary.minimum, np.nanmin(data, axis=0))
        np.testing.assert_array_equal(stream.summary.maximum, np.nanmax(data, axis=0))
        assert stream.missing == pytest.approx(4 / 18, rel=1e-15)
        data[0] = np.nan
        assert one((data.copy(), TIMES)).stream(*KEY).interval == (1.0, 2.5)

    def test_chunks_hold_about_four_megabytes(self):
        assert chunk_width(1000) * 1000 * 8 <= 2**22
        assert chunk_width(10**9) == 1

    def test_repr(self):
        assert (
            repr(one((values(), TIMES)).stream(*KEY)) == "<msrm.Stream 'rating' of p1 in run-1: 6 times x 2 features>"
        )


class TestDigest:
    def test_changes_with_everything(self):
        base = {"participant": "p1", "run": "r", "modality": "m"}
        data = values()
        frame = pd.DataFrame(data, TIMES, ["a", "b"])
        digests = [one(frame, **base).digest()]
        digests += [one(frame, **{**base, kind: "other"}).digest() for kind in base]
        digests.append(one(frame.rename(columns={"b": "c"}), **base).digest())
        digests.append(one(frame.set_axis(TIMES + 1e-12), **base).digest())
        digests.append(one(frame + 1e-15, **base).digest())
        assert len(set(digests)) == len(digests)

    def test_every_nan_is_the_same(self):
        data, other = changed((2, 1), np.nan), changed((2, 1), np.nan)
        other.view(np.uint64)[2, 1] |= 12345
        assert np.isnan(other[2, 1])
        assert one((data, TIMES)).digest() == one((other, TIMES)).digest()

    def test_survives_pickling(self):
        recording = several()
        again = pickle.loads(pickle.dumps(recording))
        assert again.digest() == recording.digest()
        assert isinstance(pickle.loads(pickle.dumps(recording.streams()[0])), Stream)


class TestConcatRuns:
    def test_joins_runs(self):
        recording = several()
        parts = [recording.select(runs=run) for run in recording.runs]
        assert msrm.concat_runs(parts).digest() == recording.digest()

    def test_equal_names_need_keys(self):
        with pytest.raises(ValueError, match=r"More than one recording has a, b; .* keys="):
            msrm.concat_runs([several(), several()])
        joined = msrm.concat_runs([several(), several()], keys=["ses-1", "ses-2"])
        assert joined.runs == ("ses-1_b", "ses-1_a", "ses-2_b", "ses-2_a")
        with pytest.raises(ValueError, match="1 keys for 2 recordings"):
            msrm.concat_runs([several(), several()], keys=["a"])
        with pytest.raises(ValueError, match="An empty recording"):
            msrm.concat_runs([])


class TestRepr:
    def test_text(self):
        data = values(3)
        data[0, 0] = np.nan
        late = np.array([0.0, 0.5, 1.0, 1.5, 2.5, 4.0])
        recording = Recording.from_dict(
            {
                "p1": {"run-1": {"rating": (data, TIMES), "physio": (values(1), late)}},
                "p2": {"run-1": {"rating": (data, TIMES)}},
            }
        )
        assert repr(recording).splitlines() == [
            "<msrm.Recording: 2 participants, 1 run, 3 streams, 336 B>",
            "  run-1: 0 to 4 s, 2 participants",
            "  modality  participants  features  times  clock                     missing",
            "  rating    2             3         6      every 0.5 s               5.6%",
            "  physio    1             1         6      every 0.5 s (0.5 to 1.5)  0.0%",
        ]

    def test_html_escapes_names(self):
        page = one((values(), TIMES), modality="a<b>")._repr_html_()
        assert "a&lt;b&gt;" in page
        assert "<b>a" not in page
        assert "6 x 2" in page


class TestIntake:
    def test_changing_the_callers_array_later_changes_nothing(self):
        values, times = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
        recording = Recording.from_dict({"p": {"r": {"m": (values, times)}}})
        before, digest = recording.stream("p", "r", "m").values.copy(), recording.digest()
        values[3, 0] = np.inf
        np.testing.assert_array_equal(recording.stream("p", "r", "m").values, before)
        assert recording.digest() == digest

    def test_a_time_column_is_no_feature(self):
        frame = pd.DataFrame({"time": np.arange(20.0) * 2, "a": np.arange(20.0)})
        with pytest.raises(ValueError, match=r"column 'time' looks like the clock.*set_index"):
            Recording.from_dict({"p": {"r": {"m": frame}}})
