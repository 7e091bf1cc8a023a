//! The conformance suite accepts the model, however it completes requests and whatever it lacks.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Facts};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};

fn check(name: &str, options: ConformOptions, completion: CompletionOrder, model: fn() -> Model) {
    conform::check(name, options, move || async move {
        Ok(ModelDevice::new(model(), completion) as Arc<dyn Device>)
    });
}

fn facts(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = Model::all_facts(300_001);
    change(&mut facts);
    facts
}

#[test]
fn the_model_keeps_the_contract_however_it_completes() {
    let options = ConformOptions::default().content(InitialContent::Zeroes);
    for completion in
        [CompletionOrder::Immediate, CompletionOrder::Deferred, CompletionOrder::Shuffled(1)]
    {
        let name = format!("{completion:?}");
        check(&name, options.clone(), completion, || Model::new(1 << 20));
    }
}

#[test]
fn odd_sizes_and_ways_to_answer() {
    let options = ConformOptions::default();
    let shuffled = CompletionOrder::Shuffled(2);
    check("odd size", options.clone(), shuffled, || {
        Model::new(100_003).with_trim(TrimEffect::Garbage).with_holes().with_runs_max(2)
    });
    check("tiny", options.clone(), shuffled, || Model::new(1));
    check("empty", options.clone(), shuffled, || Model::new(0));
    check("slow zero", options.clone(), shuffled, || Model::new(70_000).with_slow_zero());
    check("trim does nothing", options, shuffled, || {
        Model::new(70_000).with_trim(TrimEffect::Nothing)
    });
}

#[test]
fn larger_devices_are_looked_at_in_windows() {
    check("6 MiB", ConformOptions::default(), CompletionOrder::Immediate, || {
        Model::new((6 << 20) + 77)
    });
}

#[test]
fn block_sizes_are_respected_and_small_blocks_are_emulated() {
    for options in [ConformOptions::default(), ConformOptions::default().raw()] {
        check("minimum 512", options.clone(), CompletionOrder::Shuffled(3), || {
            Model::with_facts(facts(|facts| facts.block.minimum = 512))
        });
        check("minimum 4096, maximum 64 KiB", options.clone(), CompletionOrder::Deferred, || {
            Model::with_facts(facts(|facts| {
                facts.block.minimum = 4096;
                facts.block.maximum = 64 << 10;
            }))
        });
        check("minimum 512, odd size", options.clone(), CompletionOrder::Shuffled(5), || {
            Model::with_facts(facts(|facts| {
                facts.size = 100_003;
                facts.block.minimum = 512;
            }))
        });
    }
}

#[test]
fn whatever_is_lacking_is_supplied_or_left_out() {
    let lacking = [
        Can::ZERO | Can::FAST_ZERO,
        Can::FUA,
        Can::FUA | Can::FLUSH,
        Can::TRIM,
        Can::CACHE,
        Can::EXTENTS,
        Can::FAST_ZERO,
        Can::MULTI_CONN,
        Can::all(),
        Can::all() - Can::WRITE,
        Can::CHANGES,
    ];
    let options = [ConformOptions::default(), ConformOptions::default().raw()];
    for (lacking, options) in lacking.iter().flat_map(|can| options.iter().map(move |o| (*can, o)))
    {
        let name = format!("without {lacking:?}, emulate {}", options.emulate);
        conform::check(&name, options.clone(), move || async move {
            let facts = facts(|facts| {
                facts.can -= lacking;
                if lacking.contains(Can::EXTENTS) {
                    facts.contexts.clear();
                }
            });
            let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Shuffled(4));
            Ok(device as Arc<dyn Device>)
        });
    }
}

#[test]
fn several_contexts() {
    check("two contexts", ConformOptions::default(), CompletionOrder::Deferred, || {
        Model::with_facts(facts(|facts| facts.contexts.push("test:piece".to_string())))
    });
}

#[test]
fn content_may_be_told_by_a_function() {
    let oracle = InitialContent::oracle(|at| (at % 251) as u8);
    check("oracle", ConformOptions::default().content(oracle), CompletionOrder::Deferred, || {
        let mut facts = Model::all_facts(200_000);
        facts.can -= Can::CHANGES;
        Model::with_facts(facts).with_content((0..200_000).map(|at| (at % 251) as u8).collect())
    });
}
