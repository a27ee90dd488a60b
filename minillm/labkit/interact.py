"""A figure that stands still in one cell and moves in the next, from one pure function.

    def view(nproc=4, latency_us=50): ...; return figure      # pure: parameters in, figure out
    show(view)                                                # static: what GitHub and tests see
    sliders(view, nproc=(2, 8), latency_us=(1, 500))          # the same function under sliders

Figures are turned into PNG here and pyplot's registry is cleaned, so a figure appears once and none pile up.
"""

import base64
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from minillm.labkit.plots import style

View = Callable[..., Figure]


def show(view: View, **parameters: Any) -> None:
    """Display `view(**parameters)` as a still picture; the view's first docstring line is its alternative text."""
    image = render(view, **parameters)
    if _in_notebook():
        from IPython.display import display

        title = _title(view)
        png = base64.b64encode(image).decode()
        display({"image/png": png, "text/plain": title}, raw=True, metadata={"image/png": {"alt": title}})


def sliders(view: View, **controls: Any) -> None:
    """Redraw `view` as its parameters are moved.

    controls: (low, high) or (low, high, step) for a slider, a list for a choice, True or False for a tick box.
    Each starts at the view's own default; parameters without a control keep theirs.
    """
    _refuse_unknown(view, controls)
    try:
        import ipywidgets
    except ImportError:
        print(f"Sliders need the package ipywidgets; without it, call show({view.__name__}, ...) with other values.")
        return
    if not _in_notebook():
        print(f"Sliders need a notebook; here, call render({view.__name__}, ...) with other values.")
        return
    from IPython.display import display

    widgets = {name: _widget(ipywidgets, view, name, control) for name, control in controls.items()}
    natural_size = {"align_self": "flex-start", "max_width": "100%"}
    picture, message = ipywidgets.Image(format="png", layout=natural_size), ipywidgets.HTML()

    def redraw(_change: Any = None) -> None:
        try:
            picture.value, message.value = render(view, **{name: w.value for name, w in widgets.items()}), ""
        except ValueError as error:  # a corner of the parameters that the view refuses
            message.value = str(error)

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    redraw()
    display(ipywidgets.VBox([*widgets.values(), message, picture]))


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


def _widget(ipywidgets: Any, view: View, name: str, control: Any) -> Any:
    default = inspect.signature(view).parameters[name].default
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
    return (inspect.getdoc(view) or view.__name__.replace("_", " ")).splitlines()[0]


def _in_notebook() -> bool:
    return "IPython" in sys.modules and getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None
