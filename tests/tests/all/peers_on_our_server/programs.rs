//! nbdcopy, qemu-img, qemu-io, fio and nbdinfo do with our server what they do with others.

use super::*;

#[test]
fn nbdcopy_copies_from_and_to_us() {
    let nbdcopy = require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let copied = scratch.file("copied");
    let target = scratch.file("target");
    let size = (96 << 20) + 4321;
    random_image(&image, size);
    let from = serve(&scratch, "s", &["-r", text(&image)]);
    peer(&nbdcopy, &[&from.uri(""), text(&copied)]);
    assert_same(&image, &copied, "nbdcopy from us");

    garbage(&target, size).unwrap();
    let to = serve(&scratch, "t", &[text(&target)]);
    peer(&nbdcopy, &["--flush", text(&image), &to.uri("")]);
    assert_same(&image, &target, "nbdcopy to us");
    let stored = image::space(&target).unwrap().allocated;
    let data = nonzero(&image, 4096).unwrap();
    assert!(stored <= data + (1 << 20), "{stored} bytes are stored for {data} bytes of data");

    let memory = serve(&scratch, "m", &[&format!("memory:{size}")]);
    peer(&nbdcopy, &["--request-size=32M", &from.uri(""), &memory.uri("")]);
    peer(&nbdcopy, &["--synchronous", &memory.uri(""), text(&copied)]);
    assert_same(&image, &copied, "nbdcopy between our servers");
    drop((from, to, memory));
}

#[test]
fn qemu_img_converts_and_compares() {
    let qemu_img = require_peer!("qemu-img");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let copied = scratch.file("copied");
    let target = scratch.file("target");
    random_image(&image, 64 << 20);
    let from = serve(&scratch, "s", &["-r", text(&image)]);
    let uri = from.uri("");
    peer(&qemu_img, &["convert", "-f", "raw", "-O", "raw", &uri, text(&copied)]);
    assert_same(&image, &copied, "qemu-img from us");
    let qcow2 = scratch.file("qcow2");
    peer(&qemu_img, &["convert", "-W", "-m", "16", "-f", "raw", "-O", "qcow2", &uri, text(&qcow2)]);
    let same = peer(&qemu_img, &["compare", "-f", "raw", "-F", "qcow2", &uri, text(&qcow2)]);
    assert_eq!(same, "Images are identical.\n");

    garbage(&target, 64 << 20).unwrap();
    let to = serve(&scratch, "t", &[text(&target)]);
    let args = ["convert", "-n", "-f", "qcow2", "-O", "raw", text(&qcow2), &to.uri("")];
    peer(&qemu_img, &args);
    assert_same(&image, &target, "qemu-img to us");
    peer(&qemu_img, &["compare", "-s", "-f", "raw", "-F", "raw", &uri, text(&image)]);
}

#[test]
fn qemu_io_writes_zeroes_and_discards() {
    let qemu_io = require_peer!("qemu-io");
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("file");
    fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let devices = [text(&file).to_owned(), "memory:16M".to_owned()];
    for (name, device) in ["s", "t"].into_iter().zip(&devices) {
        let server = serve(&scratch, name, &[device]);
        let script = [
            "write -P 0x11 0 16M",
            "write -f -P 0x22 1M 2M",
            "write -P 0x33 1048575 1",
            "writev -P 0x44 5M 512 4096 65536",
            "write -z 6M 1M",
            "write -z -u 8M 64k",
            "write -z -f 9M 12345",
            "discard 10M 1M",
            "flush",
            "aio_write -P 0x55 12M 1M",
            "aio_write -P 0x66 13M 1M",
            "aio_write -z 14M 1M",
            "aio_read -P 0x11 15M 1M",
            "aio_flush",
            "read -P 0x11 0 1048575",
            "read -P 0x33 1048575 1",
            "read -P 0x22 1M 2M",
            "read -P 0x11 3M 2M",
            "read -P 0x44 5M 70144",
            "read -P 0x11 5313024 978432",
            "read -P 0 6M 1M",
            "read -P 0x11 7M 1M",
            "read -P 0 8M 64k",
            "read -P 0 9M 12345",
            "read -P 0x11 9449529 1036231",
            "read -P 0 10M 1M",
            "read -P 0x55 12M 1M",
            "read -P 0x66 13M 1M",
            "read -P 0 14M 1M",
            "read -P 0x11 15M 1M",
        ];
        let mut command = qemu_io.command();
        command.args(["-f", "raw", "-d", "unmap"]);
        for line in script {
            command.args(["-c", line]);
        }
        let said = done(command.arg(server.uri("")));
        assert!(!said.contains("failed"), "{device}: {said}");
    }
    // What was discarded is no longer stored.
    let map = image::data_ranges(&file).unwrap();
    let inside = |range: &std::ops::Range<u64>| range.start < 11 << 20 && range.end > 10 << 20;
    assert!(!map.iter().any(inside), "{map:?}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let fio = require_peer!("fio");
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("file");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let devices = [text(&file).to_owned(), "memory:64M".to_owned()];
    for (name, device) in ["s", "t"].into_iter().zip(&devices) {
        for sizes in ["4k-4k", "512-64k", "256k-1M"] {
            let tag = format!("{name}{sizes}");
            let server = serve(&scratch, &tag, &[device]);
            // Each job has a connection and a part of the device of its own.
            let jobs = ["--numjobs=4", "--size=16m", "--offset_increment=16m"];
            let mut command = fio.command();
            command.current_dir(scratch.path());
            command.args(["--name=x", "--ioengine=nbd", "--rw=randrw", "--iodepth=32"]);
            command.args([
                "--verify=crc32c",
                "--verify_state_save=0",
                "--verify_fatal=1",
                "--randrepeat=0",
            ]);
            command.args(jobs).arg(format!("--bsrange={sizes}"));
            command.arg(format!("--uri={}", server.uri("")));
            let said = done(&mut command);
            assert!(!said.contains("verify:"), "{said}");
            assert!(said.contains("err= 0"), "{said}");
        }
    }
}

/// A line per server of what a client says, with the addresses taken out.
fn told(servers: &[(&str, &PeerServer)], client: &PeerProgram, args: &[&str]) -> Vec<String> {
    let tell = |server: &&PeerServer| {
        let said = peer(client, &[args, &[&server.uri("")]].concat());
        said.replace(text(server.socket()), "SOCKET")
    };
    servers.iter().map(|(_, server)| tell(server)).collect()
}

#[test]
fn maps_and_sizes_are_those_of_other_servers() {
    let nbdkit = require_peer!("nbdkit");
    let nbdinfo = require_peer!("nbdinfo");
    let qemu_img = require_peer!("qemu-img");
    let qemu_nbd = require_peer!("qemu-nbd");
    let scratch = ScratchDir::on_disk().unwrap();
    let image = scratch.file("image");
    random_image(&image, 100 << 20);
    let file = text(&image);
    let ours = serve(&scratch, "s", &["-r", file]);
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &["-r", "file", file]).unwrap();
    let args = ["-r", "-e", "4", "-f", "raw", file];
    let qemus = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    let servers = [("blockhaul", &ours), ("nbdkit", &nbdkits), ("qemu-nbd", &qemus)];
    let questions: [(&PeerProgram, &[&str]); 9] = [
        (&nbdinfo, &["--size"]),
        (&nbdinfo, &["--map"]),
        (&nbdinfo, &["--map", "--json"]),
        (&nbdinfo, &["--map", "--totals"]),
        (&nbdinfo, &["--map", "--totals", "--json"]),
        (&qemu_img, &["map", "-f", "raw"]),
        (&qemu_img, &["map", "--output=json", "-f", "raw"]),
        (&qemu_img, &["info", "-f", "raw"]),
        (&qemu_img, &["info", "--output=json", "-f", "raw"]),
    ];
    for (client, args) in questions {
        let answers = told(&servers, client, args);
        for ((name, _), answer) in servers.iter().zip(&answers).skip(1) {
            assert_eq!(&answers[0], answer, "{} {args:?}: we and {name}", client.name());
        }
        assert!(!answers[0].trim().is_empty(), "{args:?}");
    }
}

/// Everything but the abilities in which servers differ.
#[test]
fn nbdinfo_describes_us_as_it_describes_nbdkit() {
    let nbdkit = require_peer!("nbdkit");
    let nbdinfo = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    random_image(&image, 1_234_567);
    let ours = serve(&scratch, "s", &[text(&image)]);
    let args = ["file", text(&image)];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let servers = [("blockhaul", &ours), ("nbdkit", &nbdkits)];
    // We have extended headers, fast zeroing and block sizes, nbdkit has not.
    let more = ["protocol:", "can_block_status_payload", "can_fast_zero", "block_size_"];
    let common = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !more.iter().any(|name| line.contains(name)));
        lines.map(str::to_owned).collect()
    };
    for args in [&[][..], &["--list"]] {
        let answers = told(&servers, &nbdinfo, args);
        assert_eq!(common(&answers[0]), common(&answers[1]), "{args:?}");
        let first = "protocol: newstyle-fixed without TLS, using extended packets\n";
        assert!(answers[0].starts_with(first), "{}", answers[0]);
    }
    let answers = told(&servers, &nbdinfo, &["--json"]);
    let parse = |text: &String| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let mut mine = parse(&answers[0]);
    let mut other = parse(&answers[1]);
    assert_eq!(mine["extended"], true);
    for value in [&mut mine, &mut other] {
        value.as_object_mut().unwrap().remove("extended");
        let export = value["exports"][0].as_object_mut().unwrap();
        export.retain(|key, _| !more.iter().any(|name| key.contains(name)));
    }
    assert_eq!(mine, other);
    for (question, answer) in [("write", 0), ("df", 0), ("rotational", 2), ("tls", 2)] {
        let mut command = nbdinfo.command();
        command.args(["--can", question, &ours.uri("")]);
        let output = blockhaul_tests::bounded(&mut command, blockhaul_tests::LIMIT);
        assert_eq!(output.status.code(), Some(answer), "{question}");
    }
}

#[test]
fn generated_devices_are_served() {
    let nbdkit = require_peer!("nbdkit");
    let nbdcopy = require_peer!("nbdcopy");
    let nbdinfo = require_peer!("nbdinfo");
    let scratch = ScratchDir::new().unwrap();
    let one = scratch.file("one");
    let two = scratch.file("two");
    let data = r#""hello" @0x200 0x55 0xAA @+100 "ab\x07"*3 @^4096 1"#;
    // Ours, and what nbdkit has to be asked for to get the same.
    let cases: [(&str, &[&str]); 5] = [
        ("pattern:5000003", &["pattern", "5000003"]),
        ("zero:3M", &["memory", "3M"]),
        ("null:3M", &["null", "3M"]),
        ("memory:123457", &["memory", "123457"]),
        (&format!("data:{data}"), &["data", &format!("data={data}")]),
    ];
    for (number, (device, args)) in cases.into_iter().enumerate() {
        let ours = serve(&scratch, &format!("s{number}"), &[device]);
        let theirs = scratch.socket(&format!("k{number}"));
        let theirs = PeerServer::nbdkit(&nbdkit, &theirs, args).unwrap();
        peer(&nbdcopy, &[&ours.uri(""), text(&one)]);
        peer(&nbdcopy, &[&theirs.uri(""), text(&two)]);
        assert_same(&one, &two, device);
        for file in [&one, &two] {
            fs::remove_file(file).unwrap();
        }
    }

    // The same sample, however it is read; sparse, with the share of data that was asked for.
    let device = "sample:64M?data=20%&seed=7";
    let ours = serve(&scratch, "sample", &[device]);
    peer(&nbdcopy, &[&ours.uri(""), text(&one)]);
    peer(&nbdcopy, &["--no-extents", "--synchronous", &ours.uri(""), text(&two)]);
    assert_same(&one, &two, device);
    let share = nonzero(&one, 4096).unwrap() * 100 / (64 << 20);
    assert!((10..=30).contains(&share), "{share}% is data");
    let totals = peer(&nbdinfo, &["--map", "--totals", "--json", &ours.uri("")]);
    let totals: serde_json::Value = serde_json::from_str(&totals).unwrap();
    let kinds: Vec<_> = totals.as_array().unwrap().iter().map(|row| &row["type"]).collect();
    assert!(kinds.len() >= 2, "{totals}");

    let mut rng = Rng::new(rng::seed());
    let seed = rng.below(1 << 32);
    let device = format!("sample:8M?seed={seed}");
    let other = serve(&scratch, "other", &[&device]);
    peer(&nbdcopy, &[&other.uri(""), text(&two)]);
    let again = serve(&scratch, "again", &[&device]);
    peer(&nbdcopy, &[&again.uri(""), text(&one)]);
    assert_same(&one, &two, &device);
}
