"""The colours of all pictures, chosen so that everybody can tell them apart, on white and on black.

The kinds of bytes use Okabe and Ito's palette. Blocks use a ramp that gets lighter along the chain, so that it can be
read without hues; everything that belongs to a block has its colour in every row.
"""

from __future__ import annotations

KIND_COLOURS = {
    "parameters": "#0072b2",
    "optimizer states": "#cc79a7",
    "gradients": "#e69f00",
    "activations": "#009e73",
    "outputs": "#6f7682",
    "shared": "#989ea8",
    "fixed": "#bfc4cb",
    "workspace": "#56b4e9",
}
STALL_COLOUR = "#d55e00"
NO_BLOCK_COLOUR = "#8a9099"
_RAMP = ((75, 79, 163), (61, 110, 168), (43, 138, 155), (42, 163, 135), (79, 185, 106), (140, 193, 82), (201, 184, 60))


def block_colour(block: int | None, n_blocks: int) -> str:
    """Return the colour of a block, as #rrggbb; neighbours differ a little in lightness too.

    Parameters
    ----------
    block: 0 .. n_blocks - 1, or None for items that belong to no block.
    """
    if block is None:
        return NO_BLOCK_COLOUR
    place = block / max(n_blocks - 1, 1) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    shade = 1.0 if block % 2 == 0 else 0.86
    mixed = (a + (b - a) * (place - low) for a, b in zip(_RAMP[low], _RAMP[low + 1]))
    return "#" + "".join(f"{round(channel * shade):02x}" for channel in mixed)


def text_on(colour: str) -> str:
    """Return black or white, whichever is more readable on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#fff" if luminance < 0.2 else "#000"
