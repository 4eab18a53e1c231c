"""Attention maps at some steps of training above curves over all steps: as a figure, and moving."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from tinyformer.analysis.pictures.charts import BASELINE_COLOUR, FONT_POINTS, Chart

MAP_INCHES, CURVES_INCHES = 1.35, 2.2  # side of a map, and height of the curves with their legend
MILLISECONDS, LAST_MILLISECONDS = 250, 2500  # of a picture of a GIF, and of the last one


class Filmstrip(Chart):
    """Maps by title, with values up to 255, above the loss and curves from 0 to 1, in which some steps are marked."""

    def __init__(
        self,
        maps: Mapping[str, UInt8[np.ndarray, "_queries _keys"]],
        columns: int,
        steps: Sequence[int],
        losses: Sequence[float],
        curves: Mapping[str, Sequence[float | None]],
        marked: Sequence[int],
    ) -> None:
        rows = -(-len(maps) // columns)
        size = max(6.4, MAP_INCHES * columns), MAP_INCHES * 1.2 * rows + CURVES_INCHES
        super().__init__(figsize=size, dpi=130, layout="constrained")
        self.agg = FigureCanvasAgg(self)
        grid = self.add_gridspec(rows + 1, columns, height_ratios=[MAP_INCHES * 1.2] * rows + [CURVES_INCHES])
        self.images = []
        for index, (title, values) in enumerate(maps.items()):
            axes = self.add_subplot(grid[divmod(index, columns)])
            axes.set_title(title, fontsize=FONT_POINTS, pad=3)
            axes.set_axis_off()
            self.images.append(axes.imshow(values, vmin=0, vmax=255, aspect="auto"))
        of_heads = self.add_subplot(grid[-1, :])
        for name, curve in curves.items():
            of_heads.plot(steps, np.array(curve, float), label=name)
        self.markers = [of_heads.axvline(step, color="0.3", linewidth=0.8, linestyle=":") for step in marked]
        of_loss = of_heads.twinx()
        of_loss.plot(steps, losses, color=BASELINE_COLOUR, linestyle="--", label="loss, nats per target (right)")
        of_heads.set(xlim=(steps[0], steps[-1]), ylim=(-0.03, 1.03))
        of_heads.set_xlabel("optimizer steps", fontsize=FONT_POINTS)
        of_heads.grid(alpha=0.3)
        for axes in (of_heads, of_loss):
            axes.tick_params(labelsize=FONT_POINTS, length=0)
            axes.spines[:].set_visible(False)
        self.legend(fontsize=FONT_POINTS, frameon=False, ncols=2, loc="outside lower center")

    def save_gif(
        self,
        path: Path,
        maps: Sequence[Sequence[UInt8[np.ndarray, "_queries _keys"]]],
        steps: Sequence[int],
        titles: Sequence[str],
    ) -> Path:
        """Write a GIF with a picture for each step, which has its own maps and title, and the first marker there."""
        pictures = []
        for of_step, step, title in zip(maps, steps, titles, strict=True):
            for image, values in zip(self.images, of_step, strict=True):
                image.set_data(values)
            self.markers[0].set_xdata([step, step])
            self.suptitle(title, fontsize=FONT_POINTS + 2)
            self.agg.draw()
            self.set_layout_engine("none")  # the layout takes most of the time, and stays as it is
            pictures.append(Image.fromarray(np.asarray(self.agg.buffer_rgba())).convert("RGB"))
        palette = pictures[-1].quantize()
        first, *others = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
        durations = [MILLISECONDS] * len(others) + [LAST_MILLISECONDS]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0)
        return path
