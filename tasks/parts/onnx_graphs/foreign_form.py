"""What a file of another tool reads, as its user declares it: layout, order of the channels, scale of the values."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Layout(StrEnum):
    """Order of the axes of a tensor."""

    nchw = "nchw"
    """Channels or classes before height and width."""
    nhwc = "nhwc"
    """Channels or classes last."""


class ChannelOrder(StrEnum):
    """Order of the channels in the input of the file."""

    rgb = "rgb"
    """As in the data set: red, green, blue, or any other channels in their order there."""
    bgr = "bgr"
    """Blue, green, red."""


class Values(StrEnum):
    """Scale of the values that the file reads."""

    normalised = "normalised"
    """(value / 255 - mean) / std."""
    unit = "unit"
    """value / 255, from 0 to 1."""
    byte = "byte"
    """value, from 0 to 255, as uint8 or as float."""


@dataclass(frozen=True)
class InputForm:
    """The input of a file, for images of C channels."""

    layout: Layout
    channel_order: ChannelOrder
    values: Values
    mean: tuple[float, ...]
    """Mean [C] on a 0..1 scale, in the order of the data set; read for normalised values only."""
    std: tuple[float, ...]
    """Standard deviation [C] on a 0..1 scale, in the order of the data set; read for normalised values only."""

    @property
    def num_channels(self) -> int:
        """Number of channels C."""
        return len(self.mean)

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation for which the file reads (value / 255 - mean) / std, in the data's order."""
        if self.values is Values.normalised:
            return self.mean, self.std
        zeros = (0.0,) * self.num_channels
        return zeros, (1.0 if self.values is Values.unit else 1 / 255,) * self.num_channels

    @property
    def axes(self) -> tuple[int, int, int]:
        """Axes of channels, height and width in the input of the file."""
        return (1, 2, 3) if self.layout is Layout.nchw else (3, 1, 2)

    def to_input(self, images_NHWC: "NDArray[np.uint8]", dtype: "np.dtype[Any]") -> "NDArray[Any]":
        """Turn images of a data set into the input of the file."""
        import numpy as np

        mean_C, std_C = (np.array(values) for values in self.normalisation)
        inputs = (images_NHWC / 255 - mean_C) / std_C
        if self.channel_order is ChannelOrder.bgr:
            inputs = inputs[..., ::-1]
        if self.layout is Layout.nchw:
            inputs = np.moveaxis(inputs, -1, 1)
        if dtype == np.uint8:
            inputs = inputs.round()
        return np.ascontiguousarray(inputs, dtype)
