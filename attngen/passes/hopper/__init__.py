"""Program -> Schedule for targets with warpgroup products and a copy engine, in four passes: stage, expand,
synchronize, allocate; `choose` ranks the configurations they are given."""

from attngen.passes.hopper.allocate import allocate as allocate
from attngen.passes.hopper.choose import output_pieces as output_pieces
from attngen.passes.hopper.choose import ranked as ranked
from attngen.passes.hopper.expand import expand as expand
from attngen.passes.hopper.stage import stage as stage
from attngen.passes.hopper.synchronize import synchronize as synchronize
