"""Program -> Schedule for targets with warpgroup products and a copy engine, in five passes: stage, expand,
synchronize, allocate, reasons; `choose` ranks the configurations they are given."""

from attngen.passes.hopper.allocate import allocate as allocate
from attngen.passes.hopper.choose import LENGTH as LENGTH
from attngen.passes.hopper.choose import Candidate as Candidate
from attngen.passes.hopper.choose import beside as beside
from attngen.passes.hopper.choose import excluded as excluded
from attngen.passes.hopper.choose import output_pieces as output_pieces
from attngen.passes.hopper.choose import ranked as ranked
from attngen.passes.hopper.choose import shorter as shorter
from attngen.passes.hopper.expand import expand as expand
from attngen.passes.hopper.reasons import reasons as reasons
from attngen.passes.hopper.stage import stage as stage
from attngen.passes.hopper.sums import sums_kernel as sums_kernel
from attngen.passes.hopper.synchronize import synchronize as synchronize
