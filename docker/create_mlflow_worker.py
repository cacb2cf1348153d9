"""Give MLflow the user `worker` with the password in MLFLOW_WORKER_PASSWORD, before its server starts.

The user is no administrator: it reads everything, and changes only the experiments and models that it created.
"""

import os

from mlflow.server.auth.config import read_auth_config
from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

store = SqlAlchemyStore()
store.init_db(read_auth_config().database_uri)
if store.has_user("worker"):
    store.update_user("worker", password=os.environ["MLFLOW_WORKER_PASSWORD"])
else:
    store.create_user("worker", os.environ["MLFLOW_WORKER_PASSWORD"])
