"""What one training step sends between the ranks, read off the layouts."""

from meshplan.traffic.forecast import forecast as forecast
from meshplan.traffic.types import Difference as Difference
from meshplan.traffic.types import Forecast as Forecast
from meshplan.traffic.types import Forward as Forward
from meshplan.traffic.types import Route as Route
from meshplan.traffic.types import Traffic as Traffic
from meshplan.traffic.types import Visit as Visit
from meshplan.traffic.types import differences as differences
