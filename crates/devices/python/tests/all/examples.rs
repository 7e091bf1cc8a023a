//! The plugins of the manual and of the examples.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use blockhaul_block::{ContextSet, Reply, Request};
use blockhaul_testkit::tools::ScratchDir;

use crate::{Plugin, read, run, write};

const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

/// The plugins in the manual.
fn manual() -> Vec<String> {
    let text = fs::read_to_string(Path::new(TREE).join("docs/plugins-python.md")).unwrap();
    let blocks = text.split("```python\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap().to_string()).collect()
}

#[test]
fn the_file_of_the_manual_is_read_and_written_past_the_cache() {
    let scratch = ScratchDir::on_disk().unwrap();
    let disk = scratch.file("disk");
    fs::File::create(&disk).unwrap().set_len(4 << 20).unwrap();
    run(move || async move {
        let options = format!("?file={}", disk.display());
        let plugin = Plugin::of(&manual()[0], &options).await.unwrap();
        let device = plugin.device().await.unwrap();
        let bytes: Vec<u8> = (0..2 << 20).map(|at: u32| (at >> 9) as u8).collect();
        write(&device, 1 << 20, &bytes).await.unwrap();
        device.submit(Request::flush()).await.unwrap();
        assert_eq!(read(&device, 1 << 20, 2 << 20).await.unwrap(), bytes);
        assert!(fs::read(&disk).unwrap()[1 << 20..3 << 20] == bytes[..]);
        let asked = Request::extents(0, 4 << 20, ContextSet::first());
        let Reply::Extents(lists) = device.submit(asked).await.unwrap() else { panic!() };
        assert_eq!(lists[0].total(), 4 << 20);
        drop((device, plugin));
        drop(scratch);
    });
}

#[test]
fn the_coroutine_of_the_manual_works() {
    run(|| async {
        let plugin = Plugin::of(&manual()[1], "").await.unwrap();
        let device = plugin.device().await.unwrap();
        assert_eq!(read(&device, 4096, 4096).await.unwrap(), vec![0; 4096]);
    });
}

/// Serves a file to `clients`, each on its own thread, by ranges.
fn serve(listener: &TcpListener, content: &'static [u8]) {
    for client in listener.incoming() {
        let client = client.unwrap();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(client.try_clone().unwrap());
            while answer(&mut lines, &client, content).is_some() {}
        });
    }
}

/// Answers one request of HTTP; `None` when the client is gone.
fn answer(lines: &mut BufReader<TcpStream>, mut client: &TcpStream, content: &[u8]) -> Option<()> {
    let mut range = None;
    let mut first = String::new();
    lines.read_line(&mut first).ok().filter(|count| *count > 0)?;
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok().filter(|count| *count > 0)?;
        if let Some(text) = line.trim_end().strip_prefix("Range: bytes=") {
            let (from, to) = text.split_once('-')?;
            range = Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?));
        }
        if line == "\r\n" {
            break;
        }
    }
    let (status, more, body) = match range {
        Some((from, to)) => ("206 Partial", "Content-Range: x\r\n", &content[from..=to]),
        None => ("200 OK", "", content),
    };
    let head = format!("HTTP/1.1 {status}\r\n{more}Content-Length: {}\r\n\r\n", body.len());
    client.write_all(head.as_bytes()).ok()?;
    if !first.starts_with("HEAD") {
        client.write_all(body).ok()?;
    }
    Some(())
}

#[test]
fn the_example_reads_a_disk_over_http() {
    let content: &'static [u8] =
        (0..3_000_000_u32).map(|at| (at / 7) as u8).collect::<Vec<_>>().leak();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || serve(&listener, content));
    let example = Path::new(TREE).join("examples/python-plugin/http_range.py");
    let mut script = String::new();
    fs::File::open(example).unwrap().read_to_string(&mut script).unwrap();
    run(move || async move {
        let options = format!("?url=http://127.0.0.1:{port}/disk.raw");
        let plugin = Plugin::of(&script, &options).await.unwrap();
        let device = plugin.device().await.unwrap();
        assert_eq!(device.facts().size, 3_000_000);
        let tasks: Vec<_> = (0..29)
            .map(|index| {
                let device = device.clone();
                blockhaul_io::spawn(async move { read(&device, index * 100_000, 100_000).await })
            })
            .collect();
        for (index, task) in tasks.into_iter().enumerate() {
            let from = index * 100_000;
            assert_eq!(task.await.unwrap(), content[from..from + 100_000], "{index}");
        }
    });
}
