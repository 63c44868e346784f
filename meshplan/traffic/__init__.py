"""What one training step sends between the ranks, read off the layouts."""

from meshplan.traffic.forecast import forecast as forecast
from meshplan.traffic.forward import Attention as Attention
from meshplan.traffic.forward import Forward as Forward
from meshplan.traffic.forward import Seen as Seen
from meshplan.traffic.forward import TokenLosses as TokenLosses
from meshplan.traffic.forward import Visit as Visit
from meshplan.traffic.types import Difference as Difference
from meshplan.traffic.types import Forecast as Forecast
from meshplan.traffic.types import Route as Route
from meshplan.traffic.types import Routed as Routed
from meshplan.traffic.types import Traffic as Traffic
from meshplan.traffic.types import differences as differences
