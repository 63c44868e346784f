"""Predict the collectives and sends of each rank in one training step, from the layouts."""

from meshplan.traffic.forecast import forecast as forecast
from meshplan.traffic.forward import AttentionCall as AttentionCall
from meshplan.traffic.forward import Forward as Forward
from meshplan.traffic.forward import ModuleVisit as ModuleVisit
from meshplan.traffic.forward import TensorUse as TensorUse
from meshplan.traffic.forward import TokenLosses as TokenLosses
from meshplan.traffic.types import Forecast as Forecast
from meshplan.traffic.types import Route as Route
from meshplan.traffic.types import Routed as Routed
from meshplan.traffic.types import RouteDifference as RouteDifference
from meshplan.traffic.types import Traffic as Traffic
from meshplan.traffic.types import differences as differences
