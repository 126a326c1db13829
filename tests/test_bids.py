"""msrm.bids and msrm.nifti: every file on its own clock, nothing invented, files named when they do not fit."""

import gzip
import json

import nibabel
import numpy as np
import pytest
from nilearn.maskers import NiftiLabelsMasker, NiftiMasker

import msrm
from msrm.bids import bids_streams
from msrm.recording_file import RecordingWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:boolean values for 'standardize'"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Dataset:
    """Writes small BIDS files."""

    def __init__(self, root):
        self.root = root

    def path(self, name, folder="func"):
        parts = name.split("_")
        path = self.root.joinpath(*[p for p in parts if p.startswith(("sub-", "ses-"))], folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def table(self, name, rows, columns=("a",), start=0.0, rate=1.0, **sidecar):
        path = self.path(name + ".tsv.gz")
        with gzip.open(path, "wt") as file:
            file.write("".join("\t".join(map(str, row)) + "\n" for row in rows))
        if columns is not None:
            meta = {"SamplingFrequency": rate, "StartTime": start, "Columns": list(columns), **sidecar}
            self.path(name + ".json").write_text(json.dumps(meta))
        return path

    def image(self, name, data, step=2.0, units="sec", **sidecar):
        image = nibabel.Nifti1Image(data.astype(np.float32), np.eye(4))
        image.header.set_zooms((1, 1, 1, step))
        image.header.set_xyzt_units("mm", units)
        path = self.path(name + ".nii.gz")
        nibabel.save(image, path)
        self.path(name + ".json").write_text(json.dumps(sidecar))
        return path

    def read(self, **arguments):
        return msrm.read_bids(self.root, task="film", **arguments)


@pytest.fixture
def dataset(tmp_path):
    return Dataset(tmp_path)


NAME = "sub-01_task-film_run-1_recording-scr_physio"
KEY = ("01", "run-1", "scr")


class TestTables:
    @pytest.mark.parametrize("start", [-22.345, 0.0, 7.5])
    @pytest.mark.parametrize("rate", [1.0, 2.5, 100.0, 1000 / 7])
    def test_five_rows_without_header_are_five_rows(self, dataset, start, rate):
        rows = np.array([[1.5, 2], [-3, 0], [0, 1e-300], [4, 5], [6, 7]])
        dataset.table(NAME, rows.tolist(), ("scr", "temp"), start, rate)
        stream = dataset.read().stream(*KEY)
        np.testing.assert_array_equal(stream.values, rows)
        assert stream.times.tolist() == [start + i / rate for i in range(5)]
        assert stream.features.tolist() == ["scr", "temp"]

    def test_missing_cells_are_missing(self, dataset):
        dataset.table(NAME, [["n/a", 1], [2, "n/a"], ["n/a", "n/a"], [3, 4]], ("a", "b"))
        expected = [[np.nan, 1], [2, np.nan], [np.nan, np.nan], [3, 4]]
        np.testing.assert_array_equal(dataset.read().stream(*KEY).values, expected)

    def test_a_single_column_of_missing_cells_keeps_its_rows(self, dataset):
        dataset.table(NAME, [["n/a"], [1], ["n/a"], [2], ["n/a"]])
        np.testing.assert_array_equal(dataset.read().stream(*KEY).values[:, 0], [np.nan, 1, np.nan, 2, np.nan])

    @pytest.mark.parametrize("columns", [("a",), ("a", "b", "c")])
    def test_columns_that_differ_from_the_sidecar_name_both_files(self, dataset, columns):
        path = dataset.table(NAME, [[1, 2], [3, 4]], columns)
        message = rf"{path}: row 0 has 2 columns and {path.with_name(NAME)}.json names {len(columns)} Columns"
        with pytest.raises(ValueError, match=message):
            dataset.read()

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([[1, 2], [3]], "row 1 has 1 columns and"),
            ([[1, 2], ["", ""], [3, 4]], "row 1 of column 'a' is ''; wanted a number or n/a"),
            ([[1, 2], [3, "calm"]], "row 1 of column 'b' is 'calm'; wanted a number or n/a. .* columns="),
            ([["a", "b"], [3, 4]], "row 0 of column 'a' is 'a'"),
            ([[1, "N/A"], [3, 4]], "row 0 of column 'b' is 'N/A'"),
            ([], "has no rows"),
        ],
    )
    def test_tables_that_hold_something_else(self, dataset, rows, message):
        dataset.table(NAME, rows, ("a", "b"))
        with pytest.raises(ValueError, match=f"scr_physio.tsv.gz: {message}" if rows else message):
            dataset.read()

    def test_an_empty_line_is_not_skipped(self, dataset):
        path = dataset.table(NAME, [[1], [2]])
        with gzip.open(path, "wt") as file:
            file.write("1\n\n2\n")
        with pytest.raises(ValueError, match="row 1 has 0 columns"):
            dataset.read()

    @pytest.mark.parametrize(
        ("sidecar", "message"),
        [
            ({"SamplingFrequency": "TR"}, r"scr_physio.json: SamplingFrequency is 'TR'; .* needs a number there"),
            ({"SamplingFrequency": 0}, r"SamplingFrequency is 0.0; .* needs a positive number"),
            ({"SamplingFrequency": None}, r"SamplingFrequency is None"),
            ({"StartTime": "n/a"}, r"StartTime is 'n/a'"),
            ({"StartTime": True}, r"StartTime is True"),
            ({"Columns": []}, r"scr_physio.json must name its 'Columns'"),
            ({"Columns": "a"}, r"must name its 'Columns'"),
        ],
    )
    def test_sidecars_that_say_too_little(self, dataset, sidecar, message):
        dataset.table(NAME, [[1], [2]], **sidecar)
        with pytest.raises(ValueError, match=message):
            dataset.read()

    def test_without_a_sidecar(self, dataset):
        dataset.table(NAME, [[1], [2]], columns=None)
        with pytest.raises(ValueError, match=r"a sidecar \(.json\), which is missing, must name its 'Columns'"):
            dataset.read()

    def test_broken_files_are_named(self, dataset):
        path = dataset.table(NAME, [[i] for i in range(1000)])
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], b"1\n2\n", whole[:-7] + b"?" + whole[-6:]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"scr_physio\.tsv\.gz cannot be read: "):
                dataset.read()
        path.write_bytes(whole)
        path.with_name(NAME + ".json").write_text("{")
        with pytest.raises(ValueError, match=r"scr_physio\.json is not valid JSON"):
            dataset.read()

    def test_sidecars_are_inherited_from_the_general_to_the_particular(self, dataset):
        dataset.table(NAME, [[1], [2], [3]], columns=None)
        dataset.table("sub-01_task-film_run-2_recording-scr_physio", [[1], [2], [3]], columns=None)
        general = {"SamplingFrequency": 5, "StartTime": 1, "Columns": ["general"]}
        (dataset.root / "task-film_physio.json").write_text(json.dumps(general))
        (dataset.root / "task-other_physio.json").write_text(json.dumps({"StartTime": 50}))
        (dataset.root / "task-film_recording-scr_physio.json").write_text(json.dumps({"Columns": ["scr"]}))
        (dataset.root / "sub-01" / "sub-01_run-2_physio.json").write_text(json.dumps({"StartTime": 2}))
        recording = dataset.read()
        assert recording.stream(*KEY).times.tolist() == [1, 1.2, 1.4]
        assert recording.stream("01", "run-2", "scr").times.tolist() == [2, 2.2, 2.4]
        assert recording.features("01", "scr").tolist() == ["scr"]

    def test_parcel_series_have_a_header_row(self, dataset):
        for seg in ("4S", "Gordon"):
            name = f"sub-01_task-film_seg-{seg}_stat-mean_timeseries"
            dataset.path(name + ".tsv").write_text("LH V1\tRH V1\n0.5\tn/a\n1.5\t2.5\n-1\t-2\n")
            dataset.path(name + ".json").write_text(json.dumps({"RepetitionTime": 1.8}))
        confounds = dataset.path("sub-01_task-film_desc-confounds_timeseries.tsv")
        confounds.write_text("trans_x\n1\n2\n")
        recording = dataset.read()
        assert recording.modalities == ("4S", "Gordon")
        stream = recording.stream("01", "run-1", "4S")
        assert stream.features.tolist() == ["LH V1", "RH V1"]
        np.testing.assert_array_equal(stream.values, [[0.5, np.nan], [1.5, 2.5], [-1, -2]])
        np.testing.assert_array_equal(stream.times, 1.8 * np.arange(3))
        confounds.with_suffix(".json").write_text(json.dumps({"SamplingFrequency": 0.5, "StartTime": 0.9}))
        motion = dataset.read(desc="confounds", seg="4S").stream("01", "run-1", "confounds")
        assert motion.times.tolist() == [0.9, 2.9]

    def test_columns_are_chosen_and_ordered(self, dataset):
        dataset.table(NAME, [[1, "x", 3], [4, "y", 6]], ("a", "note", "c"))
        dataset.table(NAME.replace("scr", "eye"), [[1, 2], [3, 4]], ("u", "v"))
        recording = dataset.read(columns={"scr": ["c", "a"]})
        assert recording.features("01", "scr").tolist() == ["c", "a"]
        np.testing.assert_array_equal(recording.stream(*KEY).values, [[3, 1], [6, 4]])
        assert recording.features("01", "eye").tolist() == ["u", "v"]
        with pytest.raises(ValueError, match="no column 'd'; there are a, c, note"):
            dataset.read(columns={"scr": ["d"]})
        with pytest.raises(ValueError, match="columns: no modality 'skin'; there are eye, scr"):
            dataset.read(columns={"skin": ["a"]})


class TestChoosing:
    def test_names(self, dataset):
        rows = [[i, -i] for i in range(4)]
        for name in (
            "sub-B_ses-2_task-film_run-01_physio",
            "sub-B_ses-1_task-film_run-01_physio",
            "sub-B_ses-1_task-film_run-01_stim",
            "sub-A_ses-1_task-film_run-01_recording-face_physio",
            "sub-A_ses-1_task-rest_run-01_recording-face_physio",
        ):
            dataset.table(name, rows, ("a", "b"))
        with pytest.warns(msrm.recording.RecordingWarning) as caught:
            recording = dataset.read()
        assert [str(w.message) for w in caught] == [
            "1 participant is without some runs: A lacks ses-2_run-01",
            "1 run of a participant is without some modalities: B in ses-2_run-01 lacks stim",
        ]
        names = [(s.participant, s.run, s.modality) for s in recording.streams()]
        assert names == [
            ("A", "ses-1_run-01", "face"),
            ("B", "ses-1_run-01", "physio"),
            ("B", "ses-1_run-01", "stim"),
            ("B", "ses-2_run-01", "physio"),
        ]
        one = dataset.read(ses="1", participants="sub-B")
        assert (one.participants, one.runs, one.modalities) == (("B",), ("run-01",), ("physio", "stim"))
        assert msrm.read_bids(dataset.root, task="rest").participants == ("A",)

    def test_what_is_not_there(self, dataset):
        dataset.table(NAME, [[1], [2]])
        dataset.image("sub-01_task-rest_bold", np.ones((2, 2, 2, 3)), RepetitionTime=2.0)
        with pytest.raises(FileNotFoundError, match=r"no file of task 'rest' .* tasks with data are film. Images are"):
            msrm.read_bids(dataset.root, task="rest")
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            msrm.read_bids(dataset.root / "none", task="film")
        with pytest.raises(ValueError, match="no file of task 'film' has sub-02; there are 01"):
            dataset.read(participants=["01", "02"])
        with pytest.raises(ValueError, match="no file of task 'film' has acqu-x; there are none"):
            dataset.read(acqu="x")
        with pytest.raises(ValueError, match="confounds are regressed out by a masker"):
            dataset.read(confounds=lambda path: None)

    def test_two_files_for_one_stream(self, dataset):
        for label in ("hi", "lo"):
            dataset.table(f"sub-01_task-film_acq-{label}_run-1_recording-scr_physio", [[1], [2]])
        with pytest.raises(ValueError, match=r"acq-hi.* and .*acq-lo.* are both 'scr' of 01 in run-1. Choose by acq="):
            dataset.read()
        assert dataset.read(acq="hi").has(*KEY)

    def test_recordings_of_a_run_keep_their_clocks(self, dataset):
        dataset.table(NAME, [[i] for i in range(10)], start=-3.0, rate=2.0)
        dataset.table(NAME.replace("scr", "resp"), [[i] for i in range(10)], start=1.5, rate=1.0)
        recording = dataset.read()
        assert recording.stream(*KEY).times.tolist() == [-3 + i / 2 for i in range(10)]
        assert recording.stream("01", "run-1", "resp").times.tolist() == [1.5 + i for i in range(10)]
        dataset.table(NAME.replace("scr", "resp"), [[i] for i in range(10)], start=100.0)
        with pytest.raises(ValueError, match=r"'scr' of 01 spans -3 to 1.5 s, 'resp' of 01 spans 100 to 109 s"):
            dataset.read()

    def test_streams_can_be_written_one_at_a_time(self, dataset, tmp_path):
        dataset.table(NAME, [[i] for i in range(10)])
        dataset.table(NAME.replace("scr", "resp"), [[-i] for i in range(10)])
        with RecordingWriter(tmp_path / "rec.nc") as writer:
            for stream in bids_streams(dataset.root, task="film"):
                writer.write(stream)
        assert msrm.open_recording(tmp_path / "rec.nc").digest() == dataset.read().digest()

    def test_the_film_annotations(self, forrest):
        with pytest.warns(msrm.recording.RecordingWarning, match=r"1 feature is constant over all runs: .*c_face"):
            recording = msrm.read_bids(forrest, task="movie")
        assert recording.participants == ("ao", "av", "movie")
        assert recording.runs == ("run-1", "run-2", "run-3", "run-4")
        stream = recording.stream("movie", "run-2", "audio")
        assert (stream.n_times, stream.n_features) == (2215, 2)
        assert stream.times.tolist() == [i / 2.5 for i in range(2215)]


LABELS = np.zeros((4, 4, 3))
LABELS[:2], LABELS[2:, 1:] = 3, 7
BOLD = "sub-01_task-film_run-1_bold"


def volumes(count=12, seed=0):
    return 100 + np.random.default_rng(seed).standard_normal((4, 4, 3, count))


def labels():
    return NiftiLabelsMasker(nibabel.Nifti1Image(LABELS.astype(np.int32), np.eye(4)), standardize=None)


class TestImages:
    def test_parcels_are_means_of_their_voxels(self, dataset):
        data = volumes()
        dataset.image(BOLD, data, RepetitionTime=2.0, StartTime=1.0)
        stream = dataset.read(masker=labels()).stream("01", "run-1", "bold")
        assert stream.features.tolist() == ["3", "7"]
        np.testing.assert_array_equal(stream.times, 1 + 2.0 * np.arange(12))
        expected = np.stack([data.astype(np.float32)[label == LABELS].mean(axis=0) for label in (3, 7)], 1)
        np.testing.assert_allclose(stream.values, expected, rtol=1e-6)  # float32 in and out

    def test_voxels_come_back_through_the_masker(self, dataset):
        data = volumes()
        dataset.image(BOLD, data, RepetitionTime=2.0)
        dataset.table(NAME, [[i % 3] for i in range(30)])
        masker = NiftiMasker(nibabel.Nifti1Image((LABELS == 7).astype(np.int8), np.eye(4)), standardize=None).fit()
        recording = dataset.read(masker=masker)
        assert recording.modalities == ("bold", "scr")
        stream = recording.stream("01", "run-1", "bold")
        assert stream.n_features == (LABELS == 7).sum()
        back = masker.inverse_transform(stream.values[5]).get_fdata()
        np.testing.assert_allclose(back[LABELS == 7], data[LABELS == 7, 5], rtol=1e-6)

    def test_confounds_and_censored_volumes(self, dataset):
        drift = np.linspace(-1, 1, 12)
        data = volumes()
        path = dataset.image(BOLD, data + 5 * drift, RepetitionTime=2.0)
        asked = []

        def confounds(image):
            asked.append(image)
            return drift[:, None], np.array([0, 1, 2, 4, 5, 6, 7, 8, 9, 10])

        stream = dataset.read(masker=labels(), confounds=confounds).stream("01", "run-1", "bold")
        assert asked == [path]
        kept = np.isfinite(stream.values).all(axis=1)
        assert np.flatnonzero(~kept).tolist() == [3, 11]
        assert np.isnan(stream.values[~kept]).all()
        np.testing.assert_array_equal(stream.times, 2.0 * np.arange(12))
        slope = np.polyfit(drift[kept], stream.values[kept], 1)[0]
        np.testing.assert_allclose(slope, 0, atol=1e-4)  # float32 values of about 100

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (np.ones((11, 1)), r"confounds of shape \(11, 1\) for 12 volumes"),
            (np.r_[np.nan, np.ones(11)][:, None], r"confounds of 1 volumes are not finite, the first is volume 0"),
        ],
    )
    def test_confounds_that_do_not_fit(self, dataset, table, message):
        dataset.image(BOLD, volumes(), RepetitionTime=2.0)
        with pytest.raises(ValueError, match=message):
            dataset.read(masker=labels(), confounds=lambda path: table)

    def test_one_masker_for_each_participant_and_all_its_runs(self, dataset):
        smaller = LABELS.copy()
        smaller[0] = 0
        for participant in ("01", "02"):
            for run in (1, 2):
                dataset.image(f"sub-{participant}_task-film_run-{run}_bold", volumes(seed=run), RepetitionTime=2.0)
        masks = {
            name: NiftiMasker(nibabel.Nifti1Image((mask > 0).astype(np.int8), np.eye(4)), standardize=None)
            for name, mask in (("01", LABELS), ("02", smaller))
        }
        recording = dataset.read(masker=masks)
        assert [recording.features(p, "bold").size for p in ("01", "02")] == [(LABELS > 0).sum(), (smaller > 0).sum()]
        with pytest.raises(ValueError, match="No masker for participant 02; there are 01"):
            dataset.read(masker={"01": masks["01"]})

    @pytest.mark.parametrize(
        ("step", "units", "sidecar", "expected"),
        [
            (2.0, "sec", {}, 2.0),
            (1500.0, "msec", {}, 1.5),
            (0.0, "sec", {"RepetitionTime": 0.8}, 0.8),
            (2000.0, "msec", {"RepetitionTime": 2.0}, 2.0),
        ],
    )
    def test_repetition_time(self, dataset, step, units, sidecar, expected):
        dataset.image(BOLD, volumes(), step, units, **sidecar)
        times = dataset.read(masker=labels()).stream("01", "run-1", "bold").times
        np.testing.assert_allclose(times, expected * np.arange(12), rtol=1e-7)  # the header holds float32

    def test_sparse_volumes(self, dataset):
        timing = [0, 2, 4, 10, 12, 14, 20, 22, 24, 30, 32, 34]
        dataset.image(BOLD, volumes(), VolumeTiming=timing)
        assert dataset.read(masker=labels()).stream("01", "run-1", "bold").times.tolist() == timing
        dataset.image(BOLD, volumes(), VolumeTiming=timing[:-1])
        with pytest.raises(ValueError, match="11 VolumeTiming for 12 volumes"):
            dataset.read(masker=labels())

    def test_clocks_that_contradict_each_other(self, dataset):
        dataset.image(BOLD, volumes(), 2.0, RepetitionTime=2000)
        with pytest.raises(ValueError, match=r"bold.json: RepetitionTime is 2000 s, while the header of .* has 2 s"):
            dataset.read(masker=labels())
        dataset.image(BOLD, volumes(), 0.0)
        with pytest.raises(ValueError, match="RepetitionTime is None"):
            dataset.read(masker=labels())

    def test_a_single_volume_is_no_series(self, dataset):
        image = nibabel.Nifti1Image(volumes()[..., 0].astype(np.float32), np.eye(4))
        nibabel.save(image, dataset.path(BOLD + ".nii.gz"))
        with pytest.raises(ValueError, match="has 3 dimensions; a series of volumes has 4"):
            dataset.read(masker=labels())

    def test_broken_images_are_named(self, dataset):
        path = dataset.image(BOLD, volumes(), RepetitionTime=2.0)
        whole = path.read_bytes()
        for length in (0, 100, len(whole) // 2):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=r"bold\.nii\.gz cannot be read: .* Is it damaged"):
                dataset.read(masker=labels())

    def test_without_nilearn(self, dataset, monkeypatch):
        monkeypatch.setattr("msrm.bids.find_spec", lambda name: None)
        dataset.table(NAME, [[1], [2]])
        assert dataset.read().has(*KEY)
        with pytest.raises(ImportError, match=r"Run: pip install 'msrm\[neuro\]'"):
            dataset.read(masker=labels())
