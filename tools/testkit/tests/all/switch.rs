//! A device is exchanged while in use: no data is lost, nothing fails, and requests in flight end
//! on the device where they began.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, DeviceExt, Error, Facts, Kind, OpKind,
    PendingRequest, Reply, Request, RequestFlags, Result, fence,
};
use blockhaul_catalog::{Barrier, Switch};
use blockhaul_io::{Data, IoEngine, Runtime, RuntimeConfig, Task, sleep, spawn, yield_now};
use blockhaul_testkit::conform::{self, ConformOptions};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

const SIZE: u64 = 1 << 20;

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Threads }).unwrap();
    runtime.block_on(test);
}

fn model(completion: CompletionOrder) -> Arc<ModelDevice> {
    ModelDevice::new(Model::new(SIZE), completion)
}

/// Without work between the old device and the new one.
async fn nothing() -> Result<()> {
    Ok(())
}

const LONG: Barrier = Barrier::Within(Duration::from_secs(30));

fn write(device: &Arc<dyn Device>, at: u64, byte: u8) -> PendingRequest {
    device.submit(Request::write(at, whole(byte)))
}

fn whole(byte: u8) -> Data {
    Data::copy_of(&[byte; 4096])
}

#[test]
fn a_handle_keeps_the_contract() {
    for completion in [CompletionOrder::Immediate, CompletionOrder::Deferred] {
        conform::check("switch", ConformOptions::default(), move || async move {
            Ok(Switch::new(fence(model(completion))).handle())
        });
    }
}

#[test]
fn without_a_barrier_requests_end_where_they_began() {
    run(|| async {
        let old = model(CompletionOrder::Immediate);
        let new = model(CompletionOrder::Immediate);
        let slow = FaultDevice::over(old.clone(), 1);
        slow.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write).nth(1));
        let switch = Switch::new(slow.clone());
        let handle = switch.handle();
        let hanging = write(&handle, 0, 1);
        switch.swap(new.clone(), Barrier::None, nothing).await.unwrap();
        write(&handle, 4096, 2).await.unwrap();
        slow.release();
        hanging.await.unwrap();
        assert_eq!((old.bytes()[0], old.bytes()[4096]), (1, 0));
        assert_eq!((new.bytes()[0], new.bytes()[4096]), (0, 2));
    });
}

#[test]
fn a_barrier_waits_for_requests_in_flight_and_lets_none_start() {
    run(|| async {
        let old = model(CompletionOrder::Immediate);
        let new = model(CompletionOrder::Immediate);
        let slow = FaultDevice::over(old.clone(), 1);
        slow.add(FaultRule::new(FaultEffect::HangAfter).kind(OpKind::Write).nth(1));
        let switch = Switch::new(slow.clone());
        let handle = switch.handle();
        let other = switch.handle();
        let hanging = write(&handle, 0, 1);
        let ran = Rc::new(Cell::new(false));
        let swap: Task<_> = spawn({
            let switch = switch.clone();
            let new = new.clone();
            let ran = ran.clone();
            async move {
                switch
                    .swap(new, LONG, async || {
                        ran.set(true);
                        Ok(())
                    })
                    .await
                    .map(|_| ())
            }
        });
        sleep(Duration::from_millis(5)).await;
        let waiting: Vec<_> = [&handle, &other, &switch.handle()]
            .into_iter()
            .enumerate()
            .map(|(index, handle)| write(handle, 4096 * (index as u64 + 1), 7))
            .collect();
        sleep(Duration::from_millis(5)).await;
        assert!(!ran.get() && slow.in_flight() == 1 && new.seen().is_empty());
        let error = switch.swap(old.clone(), LONG, nothing).await.err().unwrap();
        assert_eq!(error.kind(), Kind::Refused, "one exchange at a time");
        slow.release();
        // Only its own waiter polls the request in flight.
        hanging.await.unwrap();
        swap.await.unwrap();
        assert!(ran.get());
        for request in waiting {
            request.await.unwrap();
        }
        assert_eq!(old.bytes()[4096], 0);
        assert_eq!([4096, 8192, 12288].map(|at| new.bytes()[at]), [7; 3]);
    });
}

#[test]
fn a_request_that_nobody_waits_for_does_not_hold_up_a_barrier() {
    run(|| async {
        let switch = Switch::new(model(CompletionOrder::Deferred));
        let handle = switch.handle();
        drop(write(&handle, 0, 1));
        let old = switch.swap(model(CompletionOrder::Immediate), LONG, nothing).await.unwrap();
        assert_eq!(old.read(0, 4096).await.unwrap().bytes()[0], 1);
    });
}

#[test]
fn a_barrier_that_takes_too_long_leaves_the_old_device() {
    run(|| async {
        let old = model(CompletionOrder::Immediate);
        let slow = FaultDevice::over(old.clone(), 1);
        slow.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write).nth(1));
        let switch = Switch::new(slow.clone());
        let handle = switch.handle();
        let hanging = write(&handle, 0, 1);
        let short = Barrier::Within(Duration::from_millis(20));
        let swap = spawn({
            let switch = switch.clone();
            async move { switch.swap(model(CompletionOrder::Immediate), short, nothing).await.err() }
        });
        yield_now().await;
        let waited = write(&handle, 4096, 2);
        assert_eq!(swap.await.unwrap().kind(), Kind::TimedOut);
        waited.await.unwrap();
        assert_eq!(old.bytes()[4096], 2);
        slow.release();
        hanging.await.unwrap();
        let failing = async || Err(Error::new(Kind::Io, "the flush fails"));
        let error =
            switch.swap(model(CompletionOrder::Immediate), LONG, failing).await.err().unwrap();
        assert_eq!(error.kind(), Kind::Io);
        write(&handle, 8192, 3).await.unwrap();
        assert_eq!(old.bytes()[8192], 3);
    });
}

#[test]
fn what_the_new_device_cannot_do_is_refused_and_no_more() {
    run(|| async {
        let switch = Switch::new(model(CompletionOrder::Immediate));
        let handle = switch.handle();
        let facts = Facts { can: Can::WRITE | Can::FLUSH, ..Model::all_facts(SIZE / 2) };
        let less = Facts { contexts: Vec::new(), ..facts };
        let less = ModelDevice::new(Model::with_facts(less), CompletionOrder::Immediate);
        switch.swap(less, LONG, nothing).await.unwrap();
        assert_eq!(handle.facts().size, SIZE, "a caller keeps what it has negotiated");
        assert_eq!(switch.handle().facts().size, SIZE / 2);
        write(&handle, SIZE / 2 - 4096, 1).await.unwrap();
        let kind = |outcome: Result<Reply>| outcome.err().map(|error| error.kind());
        let gone = Some(Kind::ShuttingDown);
        assert_eq!(kind(write(&handle, SIZE / 2 - 2048, 1).await), gone);
        assert_eq!(kind(handle.submit(Request::zero(0, 4096)).await), gone);
        assert_eq!(kind(handle.submit(Request::extents(0, 4096, ContextSet::first())).await), gone);
        // A device without a cache has nothing to do, and zeroes may be no faster than writes.
        assert!(matches!(handle.submit(Request::cache(0, 4096)).await, Ok(Reply::Done)));
        assert_eq!(kind(handle.submit(Request::cache(SIZE / 2, 4096)).await), gone);
        assert_eq!(kind(handle.submit(Request::flush()).await), gone, "other handles' writes");
        // As soon as it can again, all is well.
        let slow = Facts { can: Can::all().difference(Can::FAST_ZERO), ..Model::all_facts(SIZE) };
        let slow = ModelDevice::new(Model::with_facts(slow), CompletionOrder::Immediate);
        switch.swap(slow, LONG, nothing).await.unwrap();
        let fast = || Request::zero(SIZE - 4096, 4096).with(RequestFlags::FAST);
        assert_eq!(kind(handle.submit(fast()).await), Some(Kind::Unsupported));
        handle.submit(Request::zero(SIZE - 4096, 4096)).await.unwrap();
        switch.swap(model(CompletionOrder::Immediate), LONG, nothing).await.unwrap();
        handle.submit(fast()).await.unwrap();
    });
}

/// Answers one extent for each context, with the context's number in its own list as its flags.
struct Numbered(Arc<Facts>);

impl Numbered {
    fn new(contexts: &[&str]) -> Arc<Numbered> {
        let contexts = contexts.iter().map(ToString::to_string).collect();
        Arc::new(Numbered(Arc::new(Facts { contexts, ..Model::all_facts(SIZE) })))
    }
}

impl Device for Numbered {
    fn facts(&self) -> Arc<Facts> {
        self.0.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let blockhaul_block::Op::Extents(contexts) = request.op else {
            return PendingRequest::ready(Ok(Reply::Done));
        };
        let list = |index: usize| {
            let name = self.0.contexts[index].bytes().last().unwrap();
            blockhaul_block::Extents::one(request.len, name.into())
        };
        PendingRequest::ready(Ok(Reply::Extents(contexts.iter().map(list).collect())))
    }
}

#[test]
fn contexts_keep_their_numbers_when_others_appear_and_go() {
    run(|| async {
        let switch = Switch::new(Numbered::new(&[BASE_ALLOCATION, "x:a", "x:b"]));
        let handle = switch.handle();
        let ask = async |contexts: &[usize]| {
            let set = contexts.iter().fold(ContextSet::empty(), |set, &index| set.with(index));
            match handle.submit(Request::extents(0, SIZE, set)).await {
                Ok(Reply::Extents(lists)) => {
                    Ok(lists.iter().map(|list| list.runs()[0].state).collect::<Vec<u64>>())
                }
                Ok(_) => unreachable!("the answer to another question"),
                Err(error) => Err(error.kind()),
            }
        };
        let flags = |text: &str| Ok(text.bytes().map(u64::from).collect::<Vec<u64>>());
        assert_eq!(ask(&[1, 2]).await, flags("ab"));
        let other = Numbered::new(&["x:b", BASE_ALLOCATION, "x:c", "x:a"]);
        switch.swap(other, LONG, nothing).await.unwrap();
        assert_eq!(ask(&[1, 2]).await, flags("ab"));
        assert_eq!(ask(&[0, 1, 2]).await, flags("nab"));
        assert_eq!(ask(&[2]).await, flags("b"));
        assert_eq!(switch.handle().facts().contexts.len(), 4, "new callers see what has appeared");
        switch.swap(Numbered::new(&[BASE_ALLOCATION, "x:b"]), LONG, nothing).await.unwrap();
        assert_eq!(ask(&[2]).await, flags("b"));
        assert_eq!(ask(&[1, 2]).await, Err(Kind::ShuttingDown));
    });
}

#[test]
fn a_closed_switch_ends_requests_that_wait_and_those_that_come() {
    run(|| async {
        let slow = FaultDevice::over(model(CompletionOrder::Immediate), 1);
        slow.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write).nth(1));
        let switch = Switch::new(slow.clone());
        let handle = switch.handle();
        let hanging = write(&handle, 0, 1);
        let swap = spawn({
            let switch = switch.clone();
            async move { switch.swap(model(CompletionOrder::Immediate), LONG, nothing).await.is_ok() }
        });
        yield_now().await;
        let waiting = write(&handle, 4096, 2);
        switch.close(Error::new(Kind::ShuttingDown, "the export was removed"));
        assert_eq!(waiting.await.err().unwrap().kind(), Kind::ShuttingDown);
        assert_eq!(write(&handle, 0, 3).await.err().unwrap().kind(), Kind::ShuttingDown);
        slow.release();
        hanging.await.unwrap();
        swap.await;
        assert_eq!(write(&switch.handle(), 0, 3).await.err().unwrap().kind(), Kind::ShuttingDown);
        assert!(switch.swap(model(CompletionOrder::Immediate), LONG, nothing).await.is_err());
    });
}

#[test]
fn writers_on_all_workers_lose_nothing_while_devices_are_exchanged() {
    let runtime = Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Threads }).unwrap();
    runtime.block_on(|| async {
        // Both show the same storage, as two stacks over one device do.
        let storage = model(CompletionOrder::Deferred);
        let switch = Switch::new(storage.clone());
        let writers: Vec<_> = (0..2)
            .map(|worker| {
                let handle = switch.handle();
                blockhaul_io::WorkerHandle::to(worker).spawn(move || async move {
                    for round in 1..=200u64 {
                        for index in 0..16u64 {
                            let at = (worker as u64 * 16 + index) * 4096;
                            handle.write(at, whole(round as u8)).await.unwrap();
                        }
                    }
                })
            })
            .collect();
        let mut swaps = 0;
        let mut writers = std::pin::pin!(async {
            for writer in writers {
                writer.await.unwrap();
            }
        });
        loop {
            let barrier = if swaps % 2 == 0 { LONG } else { Barrier::None };
            let new = FaultDevice::over(storage.clone(), swaps);
            switch.swap(new, barrier, nothing).await.unwrap();
            swaps += 1;
            if blockhaul_io::timeout(Duration::from_micros(300), writers.as_mut()).await.is_ok() {
                break;
            }
        }
        assert!(swaps > 5, "{swaps} exchanges");
        assert!(storage.bytes()[..32 * 4096].iter().all(|&byte| byte == 200));
    });
}
