//! Every layer passes a failed flush on (sentence 11 of the contract of devices).

use std::sync::Arc;

use blockhaul_block::{Can, Device, emulate};
use blockhaul_catalog::{HandleOpener, LayerBase, OpenFuture, Registry};
use blockhaul_testkit::conform::{self, ConformOptions, Subject};
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

const SIZE: u64 = 2 << 20;

const CHECKS: [&str; 2] =
    ["a_failed_flush_is_reported_and_not_repeated", "no_flush_succeeds_while_those_below_fail"];

/// The layers, with options under which they pass requests on.
const LAYERS: &[&str] = &[
    "allocation-depth",
    "blocksize?minimum=4k&maximum=64k",
    "cache",
    "cache?cache=writethrough",
    "contexts",
    "cow",
    "delay?write=1ms",
    "detect-zeroes",
    "error?all=0%",
    "evil?evil-probability=0",
    "extents-cache",
    "fua",
    "fua?fuamode=emulate",
    "fua?fuamode=force",
    "fua?fuamode=native",
    "log?file=/dev/null",
    "multi-conn?mode=auto",
    "multi-conn?mode=disable",
    "multi-conn?mode=emulate",
    "multi-conn?mode=emulate&track-dirty=off",
    "nocache",
    "noextents",
    "nozero",
    "offset?offset=4k",
    "protect?protect=6M-",
    "rate?rate=1G",
    "readahead",
    "retry?retries=3&retry-delay=10ms",
    "retry?retries=3&retry-delay=10ms&unflushed=fail",
    "retry-request?retries=3&delay=10ms",
    "rotational",
    "scan?scan-size=64k",
    "stats?file=/dev/null",
    "swab",
    "throttle?iops-total=1000000",
    "truncate?truncate=1M",
];

/// Layers that never write, or that need a disk in their own format.
const OTHERS: &[&str] =
    &["checkwrite", "extentlist", "gz", "luks", "partition", "pause", "readonly", "tar", "xz"];

fn registry() -> Registry {
    Registry { layers: crate::common::kinds(), ..Registry::default() }
}

/// Opens the same device again.
struct Same(Arc<FaultDevice>);

impl HandleOpener for Same {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device = emulate::emulate(self.0.clone());
        Box::pin(std::future::ready(Ok(device)))
    }
}

/// A layer over a device that implements FUA itself, or not, and two handles of it.
async fn over(text: &str, fua: bool) -> blockhaul_block::Result<Subject> {
    let mut facts = Model::all_facts(SIZE);
    facts.can.set(Can::FUA, fua);
    let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
    let below = FaultDevice::over(model, 1);
    let layer = registry().layer(text)?;
    let open = async || {
        let device = emulate::emulate(below.clone());
        let reopen: Option<Arc<dyn HandleOpener>> = Some(Arc::new(Same(below.clone())));
        layer.clone().open(LayerBase { reopen, ..LayerBase::alone(device) }).await
    };
    let handles = (open().await?, open().await?);
    let second = Arc::new(Second(handles.1));
    let opened = blockhaul_catalog::OpenedDevice { device: handles.0, more: Some(second) };
    Ok(Subject::from(opened).below(below))
}

/// A second handle.
struct Second(Arc<dyn Device>);

impl HandleOpener for Second {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(std::future::ready(Ok(self.0.clone())))
    }
}

/// The violations of a layer, by check.
fn failures(text: &'static str) -> Vec<String> {
    let mut failures = Vec::new();
    let native: &[bool] = if text.contains("native") { &[true] } else { &[true, false] };
    for &fua in native {
        let options = ConformOptions { only: CHECKS.to_vec(), ..ConformOptions::default() };
        let report = conform::run(text, options, move || over(text, fua));
        for check in CHECKS {
            if let Some(reason) = report.skipped(check) {
                eprintln!("{text}: {check} skipped: {reason}");
            }
        }
        failures.extend(report.failures().map(|(engine, check, why)| {
            format!("{text} over a device with FUA {fua} ({engine:?}): {check}: {why}")
        }));
    }
    failures
}

#[test]
fn layers_pass_failed_flushes_on() {
    let failures: Vec<_> = LAYERS.iter().flat_map(|text| failures(text)).collect();
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

#[test]
fn no_layer_is_forgotten() {
    let listed = |name: &str| {
        let named = |text: &&str| text.split('?').next() == Some(name);
        LAYERS.iter().chain(OTHERS).any(named)
    };
    let forgotten: Vec<_> =
        crate::common::kinds().iter().map(|kind| kind.name).filter(|name| !listed(name)).collect();
    assert!(forgotten.is_empty(), "{forgotten:?}");
}
