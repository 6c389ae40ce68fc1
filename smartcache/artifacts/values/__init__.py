"""What an artifact can be, and how it is kept: as a layout, inline bytes, and tensors.

    layout, inline, tensors = encode(value)
    parsed = known_layout(layout)
    value = parsed.decode(inline, fill)

`encode` walks a value and writes it, `layout` reads it back, `tensors` has what is known of dtypes
and memory, `refusals` says why something cannot be kept and where it is. Nothing here knows a file.
"""
