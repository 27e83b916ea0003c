"""Sinks: where a job's numbers, texts and pictures go besides `events.jsonl`. Each needs an extra of its own.

from paceline.sinks.mlflow import MLflow
workload = paceline.Workload(..., sinks=[paceline.TensorBoard, MLflow])
job, model, optimizer = paceline.prepare(model, optimizer, sinks=[MLflow])
"""
