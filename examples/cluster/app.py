"""Replicas of kvilt for `serve run`, on a Ray cluster that runs already:

    ray start --head
    serve run examples.cluster.app:app
    curl http://HEAD:8000/v1/models

The door listens on the head of the Ray cluster. Replicas listen on the addresses of their nodes, so give the network to
nothing else, and set keys with KVILT_API_KEY.
"""

from __future__ import annotations

import os

from kvilt.cli.cluster import default_plan
from kvilt.cluster.ray_serve import application

app = application(
    default_plan(
        os.environ.get("MODEL", "smollm2"),
        replicas=int(os.environ.get("REPLICAS", "2")),
        host="0.0.0.0",
        store=os.environ.get("STORE"),  # a folder that all nodes share: handles then outlive their replica
    )
)
