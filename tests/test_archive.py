"""The archive: bit-identical, plain for other readers, atomic, and refused when any byte of it changed."""

import os
import resource
import shutil
import signal
import subprocess
import sys

import netCDF4
import numpy as np
import pytest
import xarray as xr

import msrm
from msrm import archive
from msrm.sealed import replacing

NAMES = [
    "p 1",
    "1st.person",
    "Zoë",
    "Zoe\u0308",
    ".hidden",
    "-x",
    "trailing ",
    "a+b (c)",
    "日本",
    "p%1",
    "_%2Dx",
    "x" * 300,
]


@pytest.fixture
def tree() -> xr.DataTree:
    """Every kind of value an archive holds."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.uniform(0.1, 1.0, 7)) * 1e3 / 3
    latent = xr.Dataset(
        {
            "mean": (("time", "factor"), rng.standard_normal((7, 2))),
            "supported": ("time", np.arange(7) % 2 == 0),
            "count": ("time", np.arange(7)),
        },
        coords={
            "time": ("time", times, {"units": "seconds"}),
            "phase": ("time", times % 1.0),
            "scalar": 3.5,
            "factor": ["first", "zweiter é"],
        },
        attrs={"note": "", "text": "json: not json", "n": 3, "x": 0.1, "v": np.array([0.1, np.inf])},
    )
    latent["mean"][2, 1] = np.nan
    loading = xr.Dataset({"value": (("feature", "factor"), rng.standard_normal((3, 2)), {"units": "s"})})
    settings = {"flag": True, "none": None, "names": ["a", "b"], "nested": {"lag": [0.5, float("inf")]}}
    tree = xr.DataTree.from_dict({"/latent/run 1": latent, "/empty": xr.Dataset({"none": ("draw", np.empty(0))})})
    for name in NAMES:
        tree[f"parameters/loading/{name}/rating"] = xr.DataTree(loading * 2)
    tree["parameters"].attrs = settings
    tree.attrs["recording_digest"] = "0" * 64
    return tree


def assert_same_bits(found: xr.DataTree, wanted: xr.DataTree) -> None:
    """Every variable of `wanted` is in `found` with equal bytes, type and dimensions."""
    for node in wanted.subtree:
        dataset = node.to_dataset(inherit=False)
        other = found[node.path].to_dataset(inherit=False)
        assert set(other.variables) == set(dataset.variables)
        assert set(other.coords) == set(dataset.coords)
        for name, variable in dataset.variables.items():
            assert other[name].dims == variable.dims
            if variable.dtype.kind == "U":
                assert other[name].values.tolist() == variable.values.tolist()
            else:
                assert other[name].dtype == variable.dtype
                assert other[name].values.tobytes() == variable.values.tobytes()


class TestRoundTrip:
    def test_bits_names_and_attributes(self, tree, tmp_path):
        archive.write_tree(tree, tmp_path / "fit.nc", kind="Test")
        found = archive.read_tree(tmp_path / "fit.nc")
        assert_same_bits(found, tree)
        assert list(found["parameters/loading"].children) == NAMES
        attrs = found["latent/run 1"].attrs
        assert (attrs["note"], attrs["text"], attrs["n"], attrs["x"]) == ("", "json: not json", 3, 0.1)
        np.testing.assert_array_equal(attrs["v"], [0.1, np.inf])
        assert found["parameters"].attrs == tree["parameters"].attrs
        assert found.attrs["recording_digest"] == "0" * 64
        assert found.attrs["kind"] == "Test"
        assert found.attrs["msrm_version"] == msrm.__version__
        assert found["runtime"].attrs["dtype"] == "float64"
        assert found["runtime"].attrs["versions"]["numpy"] == np.__version__

    def test_saves_what_it_read(self, tree, tmp_path):
        path = archive.write_tree(tree, tmp_path / "fit.nc", kind="Test")
        again = archive.read_tree(path)
        for name in ("kind", "msrm_format", "msrm_version", "created"):
            del again.attrs[name]
        del again["runtime"]
        archive.write_tree(again, path, kind="Test")
        assert_same_bits(archive.read_tree(path), tree)


class TestPlainReaders:
    def test_xarray_reads_identical_values_and_decodes_nothing(self, tree, tmp_path):
        archive.write_tree(tree, tmp_path / "fit.nc", kind="Test")
        with xr.open_datatree(tmp_path / "fit.nc", engine="netcdf4") as plain:
            found = plain["latent/run 1"].to_dataset()
            wanted = tree["latent/run 1"].to_dataset()
            assert found["time"].dtype == np.float64
            assert found["time"].values.tobytes() == wanted["time"].values.tobytes()
            assert found["mean"].values.tobytes() == wanted["mean"].values.tobytes()
            assert found["supported"].dtype == bool
            assert set(found.coords) == set(wanted.coords)
            assert plain["parameters/loading/p 1/rating/value"].attrs["units"] == "s"

    @pytest.mark.parametrize("units", ["seconds", "days", "milliseconds"])
    def test_durations_stay_numbers(self, tmp_path, units):
        tree = xr.DataTree(xr.Dataset({"lag": ("x", [0.1, 1 / 3], {"units": units})}))
        archive.write_tree(tree, tmp_path / "fit.nc", kind="Test")
        with xr.open_datatree(tmp_path / "fit.nc", decode_timedelta=True) as plain:
            assert plain["lag"].values.tobytes() == tree["lag"].values.tobytes()

    def test_no_pickle_or_object_in_the_file(self, tree, tmp_path):
        archive.write_tree(tree, tmp_path / "fit.nc", kind="Test")
        kinds = set()

        def walk(group):
            kinds.update(variable.dtype for variable in group.variables.values())
            for below in group.groups.values():
                walk(below)

        with netCDF4.Dataset(tmp_path / "fit.nc") as file:
            walk(file)
        assert kinds == {np.dtype("f8"), np.dtype("i8"), np.dtype("i1"), str}


@pytest.fixture
def small() -> xr.DataTree:
    """A tree whose archive is small enough to damage every byte of it."""
    return xr.DataTree(xr.Dataset({"x": ("t", np.arange(3.0))}))


class TestDamage:
    def test_every_flipped_byte_is_refused(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        good = path.read_bytes()
        step = max(1, len(good) // 700)
        places = sorted({*range(0, len(good), step), *range(len(good) - 140, len(good))})
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=r"fit\.nc: (damaged|not a complete msrm archive)"):
                archive.read_tree(path)

    def test_every_truncation_is_refused(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        good = path.read_bytes()
        for size in [0, 1, 100, len(good) // 2, len(good) - 120, len(good) - 60, len(good) - 1]:
            path.write_bytes(good[:size])
            with pytest.raises(ValueError, match="not a complete msrm archive"):
                archive.read_tree(path)

    def test_appended_bytes_are_refused(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(ValueError, match="not a complete msrm archive"):
            archive.read_tree(path)

    def test_an_edit_by_another_program_is_refused(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        with netCDF4.Dataset(path, "a") as file:
            file["x"][0] = 5.0
        with pytest.raises(ValueError, match=r"damaged|not a complete msrm archive"):
            archive.read_tree(path)

    def test_other_netcdf_is_refused(self, tmp_path):
        xr.Dataset({"x": 1.0}).to_netcdf(tmp_path / "other.nc", engine="netcdf4")
        with pytest.raises(ValueError, match="made by another program"):
            archive.read_tree(tmp_path / "other.nc")

    def test_a_newer_format_is_refused_with_the_line_to_type(self, small, tmp_path, monkeypatch):
        monkeypatch.setattr("msrm.sealed.FORMAT", 2)
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        monkeypatch.setattr("msrm.sealed.FORMAT", 1)
        with pytest.raises(ValueError, match=r"format 2 is newer .* pip install --upgrade msrm"):
            archive.read_tree(path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no such file"):
            archive.read_tree(tmp_path / "none.nc")


KILLED = """
import os, sys, numpy as np, xarray as xr
from msrm import archive, netcdf
write = netcdf.write_groups
def killed(tree, path):
    write(tree, path)
    os.kill(os.getpid(), 9)
netcdf.write_groups = killed
archive.write_tree(xr.DataTree(xr.Dataset({"x": ("t", np.ones(1000))})), sys.argv[1], kind="Test")
"""


class TestAtomic:
    def test_a_kill_leaves_the_previous_archive(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        before = path.read_bytes()
        done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert path.read_bytes() == before

    @pytest.mark.parametrize("limit", [100, 5_000, 20_000, 100_000])
    def test_a_full_disk_leaves_the_previous_archive(self, small, tmp_path, limit):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        before = path.read_bytes()
        large = xr.DataTree(xr.Dataset({"x": ("t", np.arange(50_000.0))}))
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"cannot save .*fit\.nc: .*disk full|File too large"):
                archive.write_tree(large, path, kind="Test")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["fit.nc"]
        archive.write_tree(large, path, kind="Test")
        assert archive.read_tree(path)["x"].size == 50_000

    def test_too_little_space_is_said_before_writing(self, small, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=10))
        with pytest.raises(OSError, match=r"it needs 0\.0 MB and 0\.0 MB are free"):
            archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        assert os.listdir(tmp_path) == []

    def test_an_unwritable_value_leaves_nothing_behind(self, small, tmp_path):
        small["when"] = xr.DataArray(np.array(["2020-01-01"] * 3, dtype="datetime64[ns]"), dims="t")
        with pytest.raises(TypeError, match=r"/when: cannot archive values of type datetime64"):
            archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        assert os.listdir(tmp_path) == []

    def test_saving_over_the_file_that_is_open(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "fit.nc", kind="Test")
        with xr.open_datatree(path) as opened:
            archive.write_tree(xr.DataTree(opened.to_dataset().drop_attrs() + 1), path, kind="Test")
            assert opened["x"].values.tolist() == [0, 1, 2]
        assert archive.read_tree(path)["x"].values.tolist() == [1, 2, 3]
        with xr.open_datatree(path) as opened:
            assert opened["x"].values.tolist() == [1, 2, 3]

    def test_permissions_and_links_are_kept(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "real.nc", kind="Test")
        path.chmod(0o640)
        link = tmp_path / "link.nc"
        link.symlink_to(path)
        archive.write_tree(small, link, kind="Test")
        assert link.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o640


class TestRefusals:
    @pytest.mark.parametrize(
        ("dataset", "error", "message"),
        [
            (xr.Dataset({"z": ("t", [1j])}), TypeError, "/z: cannot archive values of type complex128"),
            (xr.Dataset({"z": ("t", np.array([{}], object))}), TypeError, "type object"),
            (xr.Dataset({"a/b": 1.0}).rename({"a/b": "-b"}), ValueError, "no variable or dimension named '-b'"),
            (xr.Dataset({"z": ("t", [1.0], {"scale_factor": 2.0})}), ValueError, "'scale_factor' would change"),
            (xr.Dataset({"z": ("t", [1.0], {"units": "seconds since 2000-01-01"})}), ValueError, "are a calendar"),
            (xr.Dataset(attrs={"a": object()}), TypeError, "cannot archive an attribute of type object"),
            (xr.Dataset(attrs={"kind": "x"}), ValueError, "the archive itself adds"),
        ],
        ids=["complex", "object", "name", "scale", "calendar", "attribute", "reserved"],
    )
    def test_what_plain_netcdf_cannot_hold(self, tmp_path, dataset, error, message):
        with pytest.raises(error, match=message):
            archive.write_tree(xr.DataTree(dataset), tmp_path / "fit.nc", kind="Test")

    def test_a_folder_that_is_not_there(self, small, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            archive.write_tree(small, tmp_path / "no" / "fit.nc", kind="Test")
        with pytest.raises(IsADirectoryError, match="give a file name"):
            archive.write_tree(small, tmp_path, kind="Test")

    def test_open_fit_of_something_else(self, small, tmp_path):
        path = archive.write_tree(small, tmp_path / "x.nc", kind="Prediction")
        with pytest.raises(ValueError, match="holds a 'Prediction', not a fitted model"):
            msrm.open_fit(path)

    def test_save_of_something_else(self, tmp_path):
        with pytest.raises(TypeError, match="cannot archive a dict; known are RMSRM"):
            archive.save_fit({}, tmp_path / "x.nc")


@pytest.mark.skipif(os.name != "posix", reason="processes are looked up as POSIX has it")
def test_what_a_killed_save_left_behind_is_removed_by_the_next_and_nothing_else(tmp_path):
    code = (
        "import os, sys\n"
        "from msrm.sealed import replacing\n"
        "with replacing(sys.argv[1]) as aside:\n"
        "    aside.write_text('half')\n"
        "    os._exit(9)\n"
    )
    target = tmp_path / "fit.nc"
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".fit.nc.")
    with replacing(target) as other:
        # Another process that lives keeps its own; here that is this one.
        with replacing(target) as aside:
            aside.write_text("whole")
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, aside.name])
        other.write_text("later")
    assert [path.name for path in tmp_path.iterdir()] == ["fit.nc"]
    assert target.read_text() == "later"
