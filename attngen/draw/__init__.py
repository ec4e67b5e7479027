"""Drawings: `picture` has shapes with numbers, `page` spells them as SVG and HTML; the others make pictures of a record
or a kernel. What they make is self-contained and the same for the same input."""
