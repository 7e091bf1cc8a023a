//! Several clients at once on one disk under random stacks of layers, against a model that knows what each
//! byte may be: each stripe of the disk is written by one client, read by all. Connections are killed in
//! the midst of requests, layers are changed and clients sent away while all are at work, and the server
//! is stopped under load. No answered write is lost, nothing hangs, and afterwards a fresh client is
//! served at full size.
//!
//! A few fixed seeds are run always, in some seconds; with `BLOCKHAUL_LONG` as many as are begun in four
//! minutes, at most a hundred; `BLOCKHAUL_SEED` runs one.

mod client;
mod model;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{PeerServer, ScratchDir, until};
use blockhaul_tests::{LIMIT, distinct, serve, text};
use blockhaul_wire::ReplyForm;
use serde_json::{Value, json};

use model::Model;

/// Bytes of the disk's file.
const SIZE: u64 = 3 << 20;
/// Clients at once.
const CLIENTS: usize = 4;

/// How long they are at work.
const BUSY: Duration = Duration::from_millis(400);

/// How long more seeds are begun where there is time.
const LONG: Duration = Duration::from_secs(240);

/// Layers that may be put over each other, from the storage on.
const LAYERS: &[&str] = &[
    "offset?offset=4097",
    "offset?offset=65536&range=2000001",
    "truncate?truncate=2500003",
    "partition?partition=1",
    "cow",
    "cow?cow-block-size=4k",
    "cache",
    "cache?cache=writethrough&cache-on-read=true",
    "cache?cache-on-read=true&cache-min-block-size=4k&cache-max-size=256k",
    "blocksize?minblock=4k&maxdata=64k",
    "blocksize?minimum=512&preferred=4k&maximum=64k&error-policy=allow",
    "error?all=3%&read=0%&after=300",
    "error?read=5%&write=5%&seed=7&after=300",
    "retry?retry-delay=1ms",
    "retry-request?delay=1ms&retries=20",
    "readahead",
    "extents-cache",
    "extents-cache?memory=1k&bulk=64k",
    "swab?swab-bits=32",
    "delay?read=1ms&write=1ms",
    "rate?rate=200M",
    "pause",
    "multi-conn?mode=emulate",
    "fua?fuamode=force",
    "fua?fuamode=emulate",
    "nozero?zeromode=emulate",
    "nozero",
    "noextents",
    "nocache?cachemode=emulate",
    "stats?file=/dev/null",
    "log?file=/dev/null",
    "scan?scan-size=64k",
    "protect?protect=4M-",
];

/// A random stack, the storage's side first.
fn stack(rng: &mut Rng) -> Vec<&'static str> {
    let mut layers: Vec<&str> = Vec::new();
    for _ in 0..rng.between(0, 4) {
        let layer = *rng.pick(LAYERS);
        let name = |layer: &str| layer.split('?').next().unwrap_or_default().to_string();
        // There is no table any more above layers that move, shorten or change what is below.
        let moved = layers.iter().any(|other| {
            ["offset", "truncate", "swab", "partition"].contains(&name(other).as_str())
        });
        let known = layers.iter().any(|other| name(other) == name(layer));
        let misplaced = moved && name(layer) == "partition";
        if !known && !misplaced {
            layers.push(layer);
        }
    }
    layers
}

/// A disk with a partition.
fn disk(path: &Path) {
    let mut bytes = distinct(SIZE);
    bytes[1 << 20..(1 << 20) + 300_000].fill(0);
    bytes[446..510].fill(0);
    bytes[450] = 0x83;
    bytes[454..458].copy_from_slice(&63_u32.to_le_bytes());
    bytes[458..462].copy_from_slice(&4999_u32.to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, bytes).unwrap();
}

/// The server's owner.
struct Owner {
    stream: BufReader<UnixStream>,
}

impl Owner {
    fn connect(path: &Path) -> Owner {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Owner { stream: BufReader::new(stream) }
    }

    /// None: the server is gone.
    fn ask(&mut self, command: &Value) -> Option<Value> {
        self.stream.get_mut().write_all(format!("{command}\n").as_bytes()).ok()?;
        let mut line = String::new();
        self.stream.read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()
    }

    fn clients(&mut self) -> Vec<u64> {
        let said = self.ask(&json!({"command": "clients"}));
        let said = said.and_then(|said| said["clients"].as_array().cloned()).unwrap_or_default();
        said.iter().filter_map(|client| client["number"].as_u64()).collect()
    }
}

/// Changes layers and sends clients away until it is over.
fn meddle(mut owner: Owner, layers: &[&str], seed: u64, over: &AtomicBool) {
    let rng = &mut Rng::new(seed);
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(rng.below(30)));
        let set = |layer: &str, name: &str, value: String| json!({"command": "set", "export": "", "layer": layer, "name": name, "value": value});
        let name = layers.get(rng.below(8) as usize).and_then(|layer| layer.split('?').next());
        match name {
            Some("pause") => {
                owner.ask(&set("pause", "paused", "on".into()));
                std::thread::sleep(Duration::from_millis(rng.below(20)));
                owner.ask(&set("pause", "paused", "off".into()));
            }
            Some("delay") => {
                let kind = *rng.pick(&["read", "write", "zero", "flush"]);
                owner.ask(&set("delay", kind, format!("{}ms", rng.below(4))));
            }
            Some("rate") => {
                owner.ask(&set("rate", "rate", format!("{}M", rng.between(20, 400))));
            }
            _ if rng.chance(5) => {
                let clients = owner.clients();
                if !clients.is_empty() {
                    let number = *rng.pick(&clients);
                    owner.ask(&json!({"command": "disconnect", "number": number}));
                }
            }
            _ => {}
        }
    }
}

/// What a single client sees.
fn size(server: &PeerServer) -> Result<u64, String> {
    Ok(Conversation::connect(server.socket())?.open("", ReplyForm::Structured)?.size)
}

/// One disk, one stack, all clients.
fn crowd(seed: u64) -> Result<(), String> {
    let rng = &mut Rng::new(seed);
    let layers = stack(rng);
    let fragile = layers.iter().any(|layer| layer.starts_with("error"));
    let scratch = if rng.chance(50) { ScratchDir::on_disk() } else { ScratchDir::new() }.unwrap();
    let path = scratch.file("disk");
    let control = scratch.socket("ctl");
    disk(&path);
    let mut args = vec!["--control", text(&control)];
    args.extend(layers.iter().flat_map(|layer| ["--layer", layer]));
    let engine = *rng.pick(&["auto", "threads"]);
    args.extend(["--engine", engine, text(&path)]);
    let server = serve(&scratch, "s", &args);
    let what = format!("seed {seed}: {layers:?} on {engine}");
    let told = |why: String| format!("{what}: {why}");
    let size = size(&server).map_err(told)?;
    let mut first = client::Client::connect(server.socket())?;
    let model = Arc::new(Model::new(&first.all(size, fragile).map_err(told)?, CLIENTS));
    drop(first);
    let over = AtomicBool::new(false);
    let stop_under_load = rng.chance(50);
    let seeds: Vec<_> = (0..=CLIENTS).map(|_| rng.number()).collect();
    let socket = server.socket().to_owned();
    let stopped = std::thread::scope(|scope| {
        let meddling =
            scope.spawn(|| meddle(Owner::connect(&control), &layers, seeds[CLIENTS], &over));
        let busy: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let model = &model;
                let socket = &socket;
                let over = &over;
                let seed = seeds[number];
                scope.spawn(move || client::busy(socket, model, number, seed, over))
            })
            .collect();
        std::thread::sleep(BUSY);
        let server = if stop_under_load { server.stop().map(Err) } else { Ok(Ok(server)) };
        over.store(true, Ordering::Relaxed);
        for client in busy {
            client.join().unwrap()?;
        }
        meddling.join().unwrap();
        server
    });
    let server = match stopped.map_err(told)? {
        Ok(server) => server,
        Err(status) if !status.success() => {
            return Err(told(format!("stopped under load: {status}")));
        }
        Err(_) if layers.iter().any(|layer| layer.starts_with("cow")) => return Ok(()),
        Err(_) => serve(&scratch, "t", &args),
    };
    // Whoever was killed is gone, and so is what it had begun.
    let mut owner = Owner::connect(&control);
    until("the clients leave", || owner.clients().is_empty());
    let mut last = client::Client::connect(server.socket()).map_err(told)?;
    let all = last.all(size, fragile).map_err(told)?;
    model.all(&all).map_err(told)?;
    // As much at once as anybody may have.
    last.at_full_size(size, fragile).map_err(told)?;
    let end = server.stop().map_err(told)?;
    if !end.success() {
        return Err(told(format!("in the end: {end}")));
    }
    Ok(())
}

#[test]
fn clients_at_once_see_one_disk() {
    let long = std::env::var_os("BLOCKHAUL_LONG").is_some();
    let seeds = match std::env::var_os("BLOCKHAUL_SEED") {
        Some(_) => vec![blockhaul_testkit::rng::seed()],
        None if long => {
            let mut rng = Rng::new(blockhaul_testkit::rng::seed());
            (0..100).map(|_| rng.number() >> 32).collect()
        }
        None => (1..=4).collect(),
    };
    let begun = Instant::now();
    let seeds = seeds.into_iter().take_while(|_| !long || begun.elapsed() < LONG);
    let mut count = 0;
    let wrong: Vec<_> =
        seeds.inspect(|_| count += 1).filter_map(|seed| crowd(seed).err()).collect();
    println!("{count} seeds in {:.0?}", begun.elapsed());
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
