"""`/v1/findings` and `/v1/topics/T/advice`: what `srtm advise` found in live arrivals, and the advice that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from srtm.control.advice import Batch
from srtm.control.api.schema import Name, TopicName
from srtm.control.clock import now_ns
from srtm.model.advice import Findings, FoundGroup
from srtm.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter

    from srtm.control.controller import Controller
    from srtm.control.topic import ManagedTopic

Count = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
InPath = Annotated[TopicName, Path()]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FoundGroupIn(_Strict):
    """Publishers that burst together."""

    publishers: list[Name] = Field(min_length=2, max_length=100_000)
    confidence: float = Field(ge=0, le=1, allow_inf_nan=False)


class TopicFindingsIn(_Strict):
    """What the arrivals of a topic in the latest window say."""

    topic: TopicName
    birth: Count = Field(description="birth of the contract that the arrivals belong to")
    messages: Count
    publishers: Count
    span_s: Amount = Field(description="time between the first and the last arrival")
    rate: Amount
    r: Amount = Field(description="tokens per second that the topic needs")
    b: Amount = Field(description="tokens in a full bucket that the topic needs")
    access_p99_ms: Milliseconds | None = None
    one_bucket_p99_ms: Milliseconds | None = Field(None, description="the same if the bucket were not split")
    groups: list[FoundGroupIn] = Field(default=[], max_length=100_000)

    def findings(self) -> Findings:
        """The findings as the model judges them."""
        return Findings(
            self.messages,
            self.publishers,
            self.span_s,
            self.rate,
            self.r,
            self.b,
            None if self.access_p99_ms is None else round(self.access_p99_ms * NS_PER_MS),
            None if self.one_bucket_p99_ms is None else round(self.one_bucket_p99_ms * NS_PER_MS),
            tuple(FoundGroup(tuple(each.publishers), each.confidence) for each in self.groups),
        )


class FindingsIn(_Strict):
    """A batch of findings; one that was taken before, by query and batch, changes nothing."""

    query: Name
    batch: Count
    valid_s: float = Field(30.0, gt=0, le=3_600, description="seconds that advice stands if no later batch renews it")
    auto: list[Literal["groups"]] = Field(default=[], max_length=1, description="what the controller may act on")
    topics: list[TopicFindingsIn] = Field(max_length=100_000)

    def taken(self) -> Batch:
        """The batch as the controller takes it."""
        topics = {(each.topic, each.birth): each.findings() for each in self.topics}
        return Batch(self.query, self.batch, round(self.valid_s * NS_PER_S), topics, "groups" in self.auto)


def add_routes(
    api: APIRouter, changes: APIRouter, controller: Controller, known: Callable[[str], ManagedTopic]
) -> None:
    """Add the endpoints."""

    @changes.post("/findings")
    async def findings(found: FindingsIn) -> dict[str, Any]:
        """Take findings of srtm advise about topics; returns the kinds of advice that stand, by topic."""
        accepted = controller.advise(found.taken(), now_ns())
        advised = {name: sorted(topic.advice.standing) for name, topic in controller.topics.items()}
        return {"accepted": accepted, "advice": {name: kinds for name, kinds in advised.items() if kinds}}

    @api.get("/topics/{topic}/advice")
    async def advice(topic: InPath) -> dict[str, Any]:
        """Get the advice that stands about a topic, with its evidence; none unless srtm advise runs."""
        at = now_ns()
        return {
            "advice": [
                {
                    "kind": kind,
                    "text": each.text,
                    "since_s": round((at - each.since_ns) / NS_PER_S, 1),
                    "evidence": each.evidence,
                }
                for kind, each in known(topic).advice.standing.items()
            ]
        }
