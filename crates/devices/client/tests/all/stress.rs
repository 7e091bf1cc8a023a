//! Random requests through client and server to a model, whose contents must match: with little
//! memory, few requests in progress, and replies in any order.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{DeviceExt, Request};
use blockhaul_io::{Data, Runtime, WorkerHandle};
use blockhaul_server::{Limits, Offers};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};
use blockhaul_testkit::rng::{self, Rng};

const OFFERS: [Offers; 3] = [
    Offers::ALL,
    Offers { extended: false, ..Offers::ALL },
    Offers { structured: false, extended: false, contexts: false, ..Offers::ALL },
];

#[test]
fn random_requests_match_the_model() {
    for (index, offers) in OFFERS.into_iter().enumerate() {
        let options = ConformOptions {
            rounds: 15,
            steps: 200,
            only: vec!["random_requests_match_the_model", "workers_write_disjoint_ranges"],
            ..ConformOptions::default().content(InitialContent::Zeroes)
        };
        conform::check(&format!("{offers:?}"), options, move || async move {
            let model = Model::new(700_001).with_trim(TrimEffect::Garbage).with_holes();
            let model = ModelDevice::new(model, CompletionOrder::Shuffled(index as u64));
            let device = FaultDevice::over(model, index as u64);
            device.reorder(20);
            device.delay_up_to(Duration::from_micros(300));
            let limits = Limits {
                requests: 5,
                payload: 256 << 10,
                client_bytes: 512 << 10,
                extents: 7,
                ..Limits::default()
            };
            let serving = crate::common::serve(device, offers, limits, 2 << 20);
            let stack = serving.open(blockhaul_client::ConnectOptions::default()).await?;
            Ok(Subject::from(stack).keep(serving))
        });
    }
}

/// Several connections from several workers, each with many requests in flight in its own range.
#[test]
fn many_connections_keep_to_their_parts() {
    const PART: u64 = 512 << 10;
    const LANES: u64 = 6;
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed:#x}");
    for engine in [blockhaul_io::IoEngine::Auto, blockhaul_io::IoEngine::Threads] {
        let runtime = Runtime::start(&blockhaul_io::RuntimeConfig { workers: 3, engine }).unwrap();
        let model = ModelDevice::new(Model::new(PART * LANES), CompletionOrder::Shuffled(seed));
        let device = model.clone();
        let mirrors = runtime.block_on(move || async move {
            // Less memory than all lanes need at a time.
            let serving = crate::common::serve(device, OFFERS[0], Limits::default(), 1 << 20);
            let stack =
                Arc::new(serving.open(blockhaul_client::ConnectOptions::default()).await.unwrap());
            let lanes = (0..LANES).map(|lane| {
                let stack = stack.clone();
                WorkerHandle::to(lane as usize).spawn(move || async move {
                    let device = stack.another().await.unwrap();
                    let mut rng = Rng::new(seed ^ lane);
                    let mut mirror = vec![0; PART as usize];
                    for _ in 0..60 {
                        // One write in each of 16 slots at a time, then everything is read.
                        let slot = PART as usize / 16;
                        let writes: Vec<_> = (0..16)
                            .map(|index| {
                                let len = rng.between(1, slot as u64) as usize;
                                let at = index * slot + rng.below((slot - len + 1) as u64) as usize;
                                rng.fill(&mut mirror[at..at + len]);
                                let data = Data::copy_of(&mirror[at..at + len]);
                                device.submit(Request::write(lane * PART + at as u64, data))
                            })
                            .collect();
                        for write in writes {
                            write.await.unwrap();
                        }
                        let at = rng.below(PART / 2) as usize;
                        let len = PART as usize / 2;
                        let found = device.read(lane * PART + at as u64, len).await.unwrap();
                        assert!(found.bytes() == &mirror[at..at + len], "lane {lane}");
                    }
                    mirror
                })
            });
            let lanes: Vec<_> = lanes.collect();
            let mut mirrors = Vec::new();
            for lane in lanes {
                mirrors.extend(lane.await.unwrap());
            }
            mirrors
        });
        assert!(model.bytes() == mirrors, "the device holds what was written");
    }
}
