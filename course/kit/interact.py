"""A figure that stands still in one cell and moves in the next, from one pure function.

    def view(nproc=4, latency_us=50): ...; return figure      # pure: parameters in, figure out
    show(view)                                                # static: what GitHub and tests see
    sliders(view, nproc=(2, 8), latency_us=(1, 500))          # the same function under sliders

Figures are turned into PNG here and pyplot's registry is cleaned, so a figure appears once and none pile up: sliders
under a still picture of the same view redraw that picture, and only where there is none do they bring their own.
"""

import base64
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from course.kit.card import in_notebook
from minillm.drawing import FILE_DPI, SHOWN_DPI, style

View = Callable[..., Figure]
_shown: dict[str, tuple[Any, dict[str, Any]]] = {}  # by view: where its still picture is displayed, its parameters


def show(view: View, **parameters: Any) -> None:
    """Display `view(**parameters)` as a still picture; the alternative text is its docstring's first paragraph."""
    image = render(view, **parameters)
    if in_notebook():
        from IPython.display import display

        bundle, metadata = _bundle(view, image)
        handle = display(bundle, raw=True, metadata=metadata, display_id=True)
        _shown[view.__qualname__] = (handle, parameters)


def sliders(view: View, **controls: Any) -> None:
    """Redraw `view` as its parameters are moved.

    controls: (low, high) or (low, high, step) for a slider, a list for a choice, True or False for a tick box.
    Each starts where the still picture above is, else at the view's own default; parameters without a control keep
    theirs.
    """
    _refuse_unknown(view, controls)
    try:
        import ipywidgets
    except ImportError:
        print(f"Sliders need the package ipywidgets; without it, call show({view.__name__}, ...) with other values.")
        return
    if not in_notebook():
        print(f"Sliders need a notebook; here, call render({view.__name__}, ...) with other values.")
        return
    from IPython.display import display

    handle, start = _shown.get(view.__qualname__, (None, {}))
    widgets = {name: _widget(ipywidgets, view, name, control, start) for name, control in controls.items()}
    natural_size = {"align_self": "flex-start", "max_width": "100%"}
    picture, message = ipywidgets.Image(format="png", layout=natural_size), ipywidgets.HTML()

    def redraw(_change: Any = None) -> None:
        try:
            image = render(view, **start | {name: widget.value for name, widget in widgets.items()})
        except ValueError as error:  # a corner of the parameters that the view refuses
            message.value = str(error)
            return
        message.value = ""
        if handle:
            bundle, metadata = _bundle(view, image)
            handle.update(bundle, raw=True, metadata=metadata)
        else:
            picture.value, picture.width = image, str(_width(image))

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    if not handle:
        redraw()
    display(ipywidgets.VBox([*widgets.values(), message, *([] if handle else [picture])]))


def render(view: View, **parameters: Any) -> bytes:
    """`view(**parameters)` as PNG bytes."""
    _refuse_unknown(view, parameters)
    with style():
        figure = view(**parameters)
        if not isinstance(figure, Figure):
            raise ValueError(f"{view.__name__} returned {type(figure).__name__}; a view returns its matplotlib Figure")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
    return buffer.getvalue()


def _bundle(view: View, image: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """What a notebook displays of a picture, and its metadata."""
    title = _title(view)
    shown = {"alt": title, "width": _width(image)}
    return {"image/png": base64.b64encode(image).decode(), "text/plain": title}, {"image/png": shown}


def _width(image: bytes) -> int:
    """The width at which a page shows a PNG, in pixels: its file has more of them, for fine screens."""
    return round(int.from_bytes(image[16:20], "big") * SHOWN_DPI / FILE_DPI)


def _widget(ipywidgets: Any, view: View, name: str, control: Any, start: dict[str, Any]) -> Any:
    default = start.get(name, inspect.signature(view).parameters[name].default)
    widget = ipywidgets.interactive.widget_from_abbrev(control, default)
    if widget is None:
        raise ValueError(
            f"{name}={control!r} is no control: give (low, high), (low, high, step), a list, True or False"
        )
    widget.description = name
    widget.style = {"description_width": "initial"}
    if "continuous_update" in widget.keys:
        widget.continuous_update = False
    return widget


def _refuse_unknown(view: View, names: dict[str, Any]) -> None:
    known = inspect.signature(view).parameters
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{view.__name__} has no parameter '{unknown[0]}'; it takes {', '.join(known) or 'none'}")


def _title(view: View) -> str:
    return first_paragraph(inspect.getdoc(view) or view.__name__.replace("_", " "))


def first_paragraph(docstring: str) -> str:
    """In one line: what a page shows of a view's docstring."""
    return " ".join(docstring.split("\n\n")[0].split())
