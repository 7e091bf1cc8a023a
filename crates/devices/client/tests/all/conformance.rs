//! Our client with our server fulfils the contract of devices, in every form of the protocol, on
//! every engine.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Facts};
use blockhaul_server::{Limits, Offers};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};

/// Memory of a test's server: enough for a few of the longest requests.
const POOL: u64 = 128 << 20;

const EXTENDED: Offers = Offers::ALL;
const STRUCTURED: Offers = Offers { extended: false, ..Offers::ALL };
const SIMPLE: Offers =
    Offers { structured: false, extended: false, contexts: false, ..Offers::ALL };

fn zeroes() -> ConformOptions {
    ConformOptions { rounds: 3, ..ConformOptions::default().content(InitialContent::Zeroes) }
}

fn check<D>(
    name: &str,
    offers: Offers,
    options: ConformOptions,
    device: impl Fn() -> Arc<D> + Send + Sync + 'static,
) where
    D: Device + 'static,
{
    let device = Arc::new(device);
    conform::check(name, options, move || {
        let device = device.clone();
        async move {
            let serving = crate::common::serve(device(), offers, Limits::default(), POOL);
            let stack = serving.open(blockhaul_client::ConnectOptions::default()).await?;
            Ok(Subject::from(stack).keep(serving))
        }
    });
}

fn model(completion: CompletionOrder) -> Arc<ModelDevice> {
    ModelDevice::new(Model::new((1 << 20) + 77), completion)
}

fn facts(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = Model::all_facts(300_001);
    change(&mut facts);
    facts
}

// nbd: extended.requests, extended.replies
#[test]
fn with_extended_headers() {
    check("extended", EXTENDED, zeroes(), || model(CompletionOrder::Shuffled(1)));
    check("extended, holes", EXTENDED, zeroes(), || {
        let model =
            Model::new(400_000).with_holes().with_runs_max(3).with_trim(TrimEffect::Garbage);
        ModelDevice::new(model, CompletionOrder::Immediate)
    });
}

// nbd: flags.df-client, command-flags.df, extended.base-needs-none
#[test]
fn with_structured_replies() {
    check("structured", STRUCTURED, zeroes(), || model(CompletionOrder::Shuffled(2)));
    check("structured, holes", STRUCTURED, zeroes(), || {
        ModelDevice::new(Model::new(400_000).with_holes(), CompletionOrder::Deferred)
    });
}

// nbd: meta.needs-selection, write.payload, baseline.requests, baseline.negotiated
#[test]
fn with_simple_replies() {
    check("simple", SIMPLE, zeroes(), || model(CompletionOrder::Shuffled(3)));
    check("simple, holes", SIMPLE, zeroes(), || {
        ModelDevice::new(Model::new(400_000).with_holes(), CompletionOrder::Deferred)
    });
}

// nbd: sizes.obeyed, sizes.client-maximum, sizes.aligned
#[test]
fn with_larger_blocks() {
    for (minimum, offers) in [(512, EXTENDED), (4096, STRUCTURED), (4096, SIMPLE)] {
        check(&format!("minimum {minimum}"), offers, zeroes(), move || {
            let facts = facts(|facts| {
                facts.size = 73 << 12;
                facts.block.minimum = minimum;
                facts.block.maximum = 256 << 10;
            });
            ModelDevice::new(Model::with_facts(facts), CompletionOrder::Shuffled(4))
        });
    }
}

// nbd: flags.only-offered, flags.fast-zero-client, flush.offered, trim.offered, zeroes.offered
// nbd: zeroes.fast-offered, baseline.negotiated
#[test]
fn with_abilities_lacking() {
    for lacking in [Can::ZERO | Can::FAST_ZERO, Can::FUA | Can::FLUSH, Can::EXTENTS, Can::CHANGES] {
        check(&format!("without {lacking:?}"), EXTENDED, zeroes(), move || {
            let facts = facts(|facts| {
                facts.can -= lacking;
                if lacking.contains(Can::EXTENTS) {
                    facts.contexts.clear();
                }
            });
            ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred)
        });
    }
}

// nbd: meta.select, meta.set-replies
#[test]
fn with_several_contexts() {
    let contexts = || vec!["test:piece".to_string(), blockhaul_block::BASE_ALLOCATION.to_string()];
    for offers in [EXTENDED, STRUCTURED] {
        conform::check("two contexts", zeroes(), move || async move {
            let mut facts = facts(|_| {});
            // States of further contexts exceed 32 bits, which needs extended headers.
            if offers.extended {
                facts.contexts.push("test:piece".to_string());
            }
            let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Deferred);
            let serving = crate::common::serve(device, offers, Limits::default(), POOL);
            let options = blockhaul_client::ConnectOptions {
                contexts: contexts(),
                ..blockhaul_client::ConnectOptions::default()
            };
            let stack = serving.open(options).await?;
            Ok(Subject::from(stack).keep(serving))
        });
    }
}

/// Durability promised by a flush or FUA survives a power cut behind the server.
#[test]
fn durability_reaches_through() {
    for (name, offers) in [("extended", EXTENDED), ("simple", SIMPLE)] {
        conform::check(name, zeroes(), move || async move {
            let device = CrashDevice::new(Model::new(1 << 20), CompletionOrder::Deferred);
            let serving = crate::common::serve(device.handle(), offers, Limits::default(), POOL);
            let stack = serving.open(blockhaul_client::ConnectOptions::default()).await?;
            Ok(Subject::from(stack).keep(serving).durable(move || device.durable()))
        });
    }
}

/// Uses all lengths; without extended headers long requests are sent in pieces.
#[test]
fn on_the_largest_device() {
    let cases = [
        ("extended", EXTENDED, "memory:9223372036854775807"),
        ("structured", STRUCTURED, "memory:1T"),
    ];
    for (name, offers, device) in cases {
        conform::check(name, zeroes(), move || async move {
            let huge = crate::common::open_local(device).await?;
            let serving = crate::common::serve(huge, offers, Limits::default(), POOL);
            let stack = serving.open(blockhaul_client::ConnectOptions::default()).await?;
            Ok(Subject::from(stack).keep(serving))
        });
    }
}

/// A server whose memory holds exactly one of the longest requests still serves everything.
#[test]
fn with_memory_for_one_request() {
    conform::check("one request", zeroes(), || async {
        let limits = Limits { payload: 1 << 20, client_bytes: 1 << 20, ..Limits::default() };
        let serving =
            crate::common::serve(model(CompletionOrder::Shuffled(5)), EXTENDED, limits, 1 << 20);
        let stack = serving.open(blockhaul_client::ConnectOptions::default()).await?;
        Ok(Subject::from(stack).keep(serving))
    });
}
