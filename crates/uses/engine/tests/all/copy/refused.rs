//! Sources and targets that do not fit together are refused before anything is written.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Error, Facts, Kind, PendingRequest, Request};
use blockhaul_catalog::Stack;
use blockhaul_engine::EngineOptions;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

use super::{dirty, on_worker, run, source_of, stack};

#[test]
fn targets_that_cannot_hold_the_source_are_refused() {
    on_worker(|| async {
        let source = stack(source_of(&[1; 10_000], false));
        let error =
            run(&source, &stack(dirty(9_999)), &EngineOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert!(error.to_string().contains("9999") && error.to_string().contains("10000"));
        let mut facts = Model::all_facts(10_000);
        facts.can -= Can::CHANGES;
        let target = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        let error = run(&source, &stack(target), &EngineOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ReadOnly);
    });
}

/// A device whose size is no multiple of its blocks.
fn with_tail(size: usize, minimum: u32, byte: u8) -> Arc<ModelDevice> {
    let mut facts: Facts = Model::all_facts(size as u64);
    facts.zeroed = false;
    facts.block.minimum = minimum;
    let model = Model::with_facts(facts).with_content(vec![byte; size]);
    ModelDevice::new(model, CompletionOrder::Immediate)
}

/// A device that refuses requests for a part of a block, at the end, too.
struct WholeBlocks(Arc<ModelDevice>);

impl Device for WholeBlocks {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.len.is_multiple_of(self.facts().block.minimum.into()) {
            self.0.submit(request)
        } else {
            Error::new(Kind::Invalid, "a part of a block").into()
        }
    }
}

fn strict(device: Arc<ModelDevice>) -> Stack {
    Stack::over(Arc::new(WholeBlocks(device)))
}

#[test]
fn tails_are_copied_by_one_shorter_request() {
    on_worker(|| async {
        for minimum in [512, 4096, 65536] {
            let size = 4 * minimum as usize + 200;
            let [source, target] = [1, 2].map(|byte| with_tail(size, minimum, byte));
            let options = EngineOptions::default();
            run(&stack(source), &stack(target.clone()), &options).await.unwrap();
            assert!(target.bytes().iter().all(|&byte| byte == 1), "{minimum}");
        }
    });
}

#[test]
fn tails_that_a_device_refuses_are_refused_before_anything_is_written() {
    on_worker(|| async {
        for minimum in [512, 4096, 65536] {
            let whole = 4 * minimum as usize;
            let size = whole + 200;
            let options = EngineOptions::default();
            let ends = [
                (stack(source_of(&vec![1; size], true)), with_tail(size, minimum, 2), "written"),
                (strict(with_tail(size, minimum, 1)), dirty(size + 4096), "read"),
            ];
            for (source, target, done) in ends {
                let before = target.bytes();
                let to =
                    if done == "written" { strict(target.clone()) } else { stack(target.clone()) };
                let error = run(&source, &to, &options).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid);
                let said = error.to_string();
                assert!(said.contains(&format!("the last 200 of {size}")), "{said}");
                assert!(said.contains(done), "{said}");
                assert!(target.bytes() == before, "{said}");
            }
            // The reachable part is copied, to whole blocks and to a part of one.
            for len in [whole, whole - 100] {
                let target = with_tail(size, minimum, 2);
                let source = source_of(&vec![1; len], true);
                run(&stack(source), &strict(target.clone()), &options).await.unwrap();
                let copied = target.bytes();
                assert!(copied[..len].iter().all(|&byte| byte == 1), "{minimum} {len}");
                assert!(copied[len..].iter().all(|&byte| byte == 2), "{minimum} {len}");
            }
            let part = EngineOptions { ranges: Some(vec![(0, whole as u64)].into()), ..options };
            let target = dirty(size);
            run(&strict(with_tail(size, minimum, 1)), &stack(target.clone()), &part).await.unwrap();
            assert!(target.bytes()[..whole].iter().all(|&byte| byte == 1), "{minimum}");
        }
    });
}
