# SPDX-License-Identifier: Apache-2.0
"""Device time as costs for OpenCost's plugins.

Outside document: OpenCost, ``protos/customcost/messages.proto``, message ``CustomCostResponse``, in
the JSON form of protocol buffers. A plugin parses it and returns it to OpenCost for its window.
Costs are in the response's currency, times RFC 3339.
"""

from collections.abc import Mapping
from typing import Any, Final

from hamictl import client

DOMAIN: Final = "hami"
COST_SOURCE: Final = "compute"
VERSION: Final = "v1"
HOUR_S: Final = 3600.0


def response_of(
    answer: client.Consumption,
    rows: list[Mapping[str, object]],
    *,
    start: str,
    end: str,
    problems: list[str],
) -> dict[str, Any]:
    """Return the response; ``rows`` are those of ``answer`` with columns of FOCUS."""
    return {
        "metadata": {"by": answer.by, **({"label": answer.label} if answer.label else {})},
        "cost_source": COST_SOURCE,
        "domain": DOMAIN,
        "version": VERSION,
        "currency": answer.currency,
        "start": start,
        "end": end,
        "costs": [_cost(answer, one, row) for one, row in zip(answer.items, rows, strict=True)],
        "errors": problems,
    }


def _cost(
    answer: client.Consumption, one: client.ConsumptionRow, row: Mapping[str, object]
) -> dict[str, Any]:
    hours = one.reserved_s / HOUR_S
    cost = one.cost or 0.0
    key = answer.label or answer.by
    attributes = {
        "provider": row["ServiceName"],
        "service_category": row["ServiceCategory"],
        "service_name": row["ServiceName"],
        "sku_id": row["SkuId"],
        "sku_price_id": row["SkuPriceId"],
        "sub_account_id": row["SubAccountId"],
        "sub_account_name": row["SubAccountId"],
        "effective_cost": cost,
        "pricing_quantity": hours,
        "pricing_unit": row["ConsumedUnit"],
    }
    return {
        "charge_category": row["ChargeCategory"],
        "description": f"device time by {key}: {one.name or 'none'}",
        "resource_name": one.name,
        "resource_type": row["ResourceType"] or answer.by,
        "id": f"{DOMAIN}/{key}/{one.name}/{row['ChargePeriodStart']}/{row['ChargePeriodEnd']}",
        "provider_id": row["ResourceId"] or "",
        "billed_cost": cost,
        "list_cost": cost,
        "list_unit_price": cost / hours if hours else 0.0,
        "usage_quantity": hours,
        "usage_unit": row["ConsumedUnit"],
        "labels": {key: one.name} if one.name else {},
        "extended_attributes": {name: value for name, value in attributes.items() if value},
    }
