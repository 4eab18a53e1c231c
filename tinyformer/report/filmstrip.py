"""Attention maps at some steps of training above curves over all steps: as a figure, and moving."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from tinyformer.report.charts import BASELINE_COLOUR, FONT_POINTS, Chart, say_empty, simplify

MAP_INCHES, CURVES_INCHES = (1.35, 1.6), 2.2  # width and height of a map, and height of the curves
MILLISECONDS, LAST_MILLISECONDS = 250, 2500  # of a picture of a GIF, and of the last one

Map: TypeAlias = UInt8[np.ndarray, "_queries _keys"]


class Filmstrip(Chart):
    """Maps by title, with values up to 255, above curves from 0 to 1 and the loss by step; some steps are marked."""

    def __init__(
        self,
        maps: Mapping[str, Map],
        columns: int,
        marked: Sequence[int],
        steps: Sequence[int],
        losses: Sequence[float],
        curves: Mapping[str, Sequence[float | None]],
    ) -> None:
        rows, (width, height) = -(-len(maps) // columns), MAP_INCHES
        size = max(6.4, width * columns), height * rows + CURVES_INCHES
        super().__init__(figsize=size, dpi=130, layout="constrained")
        self.agg, self.images, self.steps, self.losses = FigureCanvasAgg(self), [], steps, losses
        grid = self.add_gridspec(rows + 1, columns, height_ratios=[height] * rows + [CURVES_INCHES])
        for index, (title, values) in enumerate(maps.items()):
            axes = self.add_subplot(grid[divmod(index, columns)])
            axes.set_title(title, fontsize=FONT_POINTS, y=1.0, pad=3)  # a fixed height saves half of the time
            axes.set_axis_off()
            self.images.append(axes.imshow(values, vmin=0, vmax=255, aspect="auto"))
        axes = self.add_subplot(grid[-1, :], xlim=(steps[0], steps[-1]), ylim=(-0.03, 1.03))
        for name, curve in curves.items():
            axes.plot(steps, np.array(curve, float), label=name)
        if not curves:
            say_empty(axes, "no head acquired a role")
        self.markers = [axes.axvline(step, color="0.4", linewidth=1) for step in marked]
        axes.set_xlabel("optimizer steps")
        axes.grid(alpha=0.3)
        of_loss = axes.twinx()
        of_loss.plot(steps, losses, color=BASELINE_COLOUR, linestyle="--", label="loss, nats per target (right)")
        for side in (axes, of_loss):
            simplify(side)
        self.legend(fontsize=FONT_POINTS, frameon=False, ncols=2, loc="outside lower center")

    def save_gif(self, path: Path, maps: Sequence[Sequence[Map]]) -> Path:
        """Write a picture for each step, which has its own maps and the first marker."""
        pictures, title = [], self.suptitle("", fontsize=FONT_POINTS + 2)
        for step, loss, of_step in zip(self.steps, self.losses, maps, strict=True):
            for image, values in zip(self.images, of_step, strict=True):
                image.set_data(values)
            self.markers[0].set_xdata([step, step])
            title.set_text(f"step {step:,}, loss {loss:.3f}")
            self.agg.draw()
            self.set_layout_engine("none")  # the layout takes most of the time, and stays as it is
            pictures.append(Image.fromarray(np.asarray(self.agg.buffer_rgba())).convert("RGB"))
        palette = pictures[-1].quantize()
        first, *others = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
        durations = [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0)
        return path
