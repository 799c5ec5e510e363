"""One step of the executor as complete, frozen values: rows, the batch they form, its tensors, and what comes back."""

from .batch import Batch as Batch
from .logits import Logits as Logits
from .logits import Scores as Scores
from .row import Adapted as Adapted
from .row import Adapter as Adapter
from .row import Base as Base
from .row import Embeds as Embeds
from .row import Hidden as Hidden
from .row import HiddenOut as HiddenOut
from .row import Ids as Ids
from .row import KeyMass as KeyMass
from .row import Last as Last
from .row import LayerSpan as LayerSpan
from .row import Nothing as Nothing
from .row import Repair as Repair
from .row import Row as Row
from .row import SampledIds as SampledIds
from .row import Score as Score
from .row import Source as Source
from .row import UnrotatedKV as UnrotatedKV
from .row import Want as Want
from .row import token_count as token_count
from .step_input import PlacedRepair as PlacedRepair
from .step_input import Segment as Segment
from .step_input import StepInput as StepInput
