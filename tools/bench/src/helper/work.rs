//! Fixed workloads, for counting instructions: the same work on every machine, so that two commits
//! can be compared where times say nothing. See `cargo xtask bench --guard`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{DeviceExt as _, Extents, HOLE, ZERO};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{IoEngine, Listener, Pool, Runtime, RuntimeConfig};
use blockhaul_wire::request::RequestForm;
use clap::ValueEnum;

use crate::folder::ScratchFolder;
use blockhaul_measure::{MeasureError, Result};

/// Which workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WorkloadKind {
    /// A request header and a reply header, encoded and parsed, in all three forms, and a status of
    /// 64 extents.
    Codec,
    /// Lists of 64 extents: built, cut at both ends, walked.
    Extents,
    /// A read of 4 KiB from memory, through our client and our server over a Unix socket.
    Request,
    /// 4 MiB of a disk with few data but many extents, copied to nowhere.
    Plan,
}

/// Carries out a workload so many times.
pub fn run(kind: WorkloadKind, count: u32) -> Result<()> {
    match kind {
        WorkloadKind::Codec => (0..count).try_for_each(codec),
        WorkloadKind::Extents => {
            (0..count).for_each(extents);
            Ok(())
        }
        WorkloadKind::Request => requests(count),
        WorkloadKind::Plan => plan(count),
    }
}

fn codec(number: u32) -> Result<()> {
    let broken =
        |error: blockhaul_wire::ProtocolError| MeasureError::new(format!("codec: {error}"));
    let cookie = u64::from(number);
    for (headers, replies) in [
        (RequestForm::Compact, blockhaul_wire::ReplyForm::Simple),
        (RequestForm::Compact, blockhaul_wire::ReplyForm::Structured),
        (RequestForm::Extended, blockhaul_wire::ReplyForm::Extended),
    ] {
        let request = blockhaul_wire::request::RequestHeader {
            flags: blockhaul_wire::flags::CommandFlags::from_bits(0),
            command: blockhaul_wire::request::CommandCode::Read,
            cookie,
            offset: cookie << 12,
            length: 4096,
        };
        let bytes = request.encode(headers).map_err(broken)?;
        let parsed = blockhaul_wire::request::RequestHeader::parse(black_box(&bytes), headers)
            .map_err(broken)?;
        let answer = blockhaul_wire::reply::ReplyEncoder { replies, cookie, offset: cookie << 12 };
        let flags = blockhaul_wire::flags::ReplyFlags::from_bits(1);
        let head = answer.data(flags, request.offset, 4096).map_err(broken)?;
        let reply =
            blockhaul_wire::reply::ReplyHeader::parse(black_box(&head), replies).map_err(broken)?;
        black_box((parsed, reply));
        if replies == blockhaul_wire::ReplyForm::Simple {
            continue;
        }
        let list = (0..64_u64)
            .map(|at| blockhaul_wire::status::StatusExtent { len: 4096 + at, flags: at & 3 });
        let wanted = blockhaul_wire::status::StatusLimits::new(1 << 20);
        let mut out = Vec::new();
        let chunk = blockhaul_wire::status::StatusChunk { flags, context: 1, wanted };
        blockhaul_wire::status::emit(&answer, chunk, list, &mut out).map_err(broken)?;
        black_box(&out);
    }
    Ok(())
}

fn extents(number: u32) {
    let mut list = Extents::new();
    for at in 0..64_u64 {
        let state = if (at ^ u64::from(number)) & 1 == 0 { 0 } else { HOLE | ZERO };
        list.push(4096 << (at & 7), state);
    }
    list.truncate(list.total() - 5000);
    list.skip(3000);
    let data: u64 = list.ranges(3000).filter(|(_, run)| run.state == 0).map(|(at, _)| at).sum();
    black_box((data, list.len()));
}

fn requests(count: u32) -> Result<()> {
    let dir = ScratchFolder::new(&std::env::temp_dir(), "temporary", false)?;
    let path = dir.path.join("socket");
    let uri = format!("nbd+unix:///?socket={}", path.display());
    over("request", move |registry| async move {
        let served = registry.open(&spec("memory:1M")?, Vec::new(), Intent::WRITE).await?;
        served.device().write(0, blockhaul_io::Data::copy_of(&[7; 65536])).await?;
        let server = blockhaul_server::Server::new(blockhaul_server::ServerConfig {
            exports: blockhaul_catalog::SharedDevice::new("", "", served.device().clone()),
            limits: blockhaul_server::Limits::default(),
            offers: blockhaul_server::Offers::default(),
            pool: Pool::new(16 << 20),
            tls: blockhaul_server::TlsPolicy::Off,
        });
        let listener = Listener::bind_unix(&path).map_err(|error| {
            blockhaul_block::Error::new(blockhaul_block::Kind::Io, error.to_string())
        })?;
        let listening = blockhaul_io::spawn(server.clone().listen(listener));
        let client = registry.open(&spec(&uri)?, Vec::new(), Intent::READ).await?;
        for number in 0..u64::from(count) {
            black_box(client.device().read((number % 16) << 12, 4096).await?);
        }
        drop(client);
        server.stop(Duration::from_secs(1)).await;
        listening.await;
        Ok(())
    })
}

fn plan(count: u32) -> Result<()> {
    over("plan", move |registry| async move {
        let source = format!("sample:{}M?data=1%", u64::from(count) * 4);
        let source = registry.open(&spec(&source)?, Vec::new(), Intent::READ).await?;
        let size = source.device().facts().size;
        let target = registry.open(&spec("null:")?, Vec::new(), Intent::target(size)).await?;
        let options = blockhaul_engine::EngineOptions {
            sparse: 0,
            adaptive: false,
            ..blockhaul_engine::EngineOptions::default()
        };
        let progress = Arc::new(blockhaul_engine::CopyProgress::new());
        blockhaul_engine::copy(&source, &target, &options, &Pool::new(16 << 20), &progress).await?;
        Ok(())
    })
}

fn spec(text: &str) -> blockhaul_block::Result<DeviceSpec> {
    DeviceSpec::parse(text.as_ref())
}

/// On one worker and without io_uring, whose instructions the kernel spends unseen.
fn over<F>(what: &str, work: impl FnOnce(Registry) -> F + Send + 'static) -> Result<()>
where
    F: Future<Output = blockhaul_block::Result<()>> + 'static,
{
    let failed =
        |error: &dyn std::fmt::Display| MeasureError::new(format!("workload {what}: {error}"));
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Threads })
        .map_err(|error| failed(&error))?;
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_client::all(blockhaul_client::ConnectOptions::default()));
    let registry = Registry {
        backends,
        path: blockhaul_backends::PATH_SCHEME,
        command: "command",
        ..Registry::default()
    };
    runtime.block_on(move || work(registry)).map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_can_be_carried_out() {
        for kind in WorkloadKind::value_variants() {
            run(*kind, 2).unwrap();
        }
    }
}
