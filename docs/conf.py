"""The documentation site: `make docs`. Sphinx, for its reference pages are checked and it needs no network."""

import swbn_lightning

project = "swbn_lightning"
copyright = "the swbn_lightning authors"
version = release = swbn_lightning.__version__

extensions = [
    "myst_nb",  # pages in Markdown, and the notebook
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"swbn_lightning {version}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "text"  # of blocks that name no language

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings, by the names that code hosts give them
nb_execution_mode = "off"  # a test runs the notebook; the site shows what is stored in it

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Shape"]


def link_by_last_name(app, env, node, contnode):
    """Docstrings name a class as their own file imports it; the pages know it by its public name."""
    domain = env.get_domain("py")
    last = node.get("reftarget", "").split(".")[-1]
    found = {name for name, *_ in domain.get_objects() if name.split(".")[-1] == last and name.split(".")[0] in OURS}
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found.pop(), node, contnode)


OURS = ("swbn_lightning", "fewshot", "classification")


def setup(app):
    app.connect("missing-reference", link_by_last_name)
