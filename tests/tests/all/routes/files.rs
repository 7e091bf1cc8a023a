//! Between files: shared, copied by the kernel, past the page cache or through it.

use super::*;

#[test]
fn what_is_cold_and_large_goes_past_the_page_cache() {
    let scratch = ScratchDir::on_disk().unwrap();
    let source = scratch.file("source.img");
    let target = scratch.file("target.img");
    let size = (64 << 20) + 1234;
    image::sparse(&source, size, seed()).unwrap();
    let ends = [text(&source), text(&target)];
    let file = make_cold(&source);
    if file.cached(0, size) != Some(0) {
        return tools::skip("the page cache cannot be emptied here");
    }
    let taken = routes(&mut copy(&ends));
    let cached = [file, open(&target)].map(|file| file.cached(0, size).unwrap());
    assert_same(&source, &target, "past the page cache");
    let data = some(&taken, "memory");
    let read = some(&taken, "direct-read");
    let written = some(&taken, "direct-write");
    // The last block is no whole one.
    assert!(read + 4096 > data && written + 4096 > data, "{taken:?}");
    // Files are read ahead in steps of this at the end, which alone is read through the page cache.
    assert!(cached.iter().all(|&bytes| bytes <= 256 << 10), "{cached:?}");
    // Now the source is cached, unless the kernel needs the memory for something else meanwhile.
    let warm = (0..5).find_map(|_| {
        let taken = (read_into_cache(&source)).then(|| routes(&mut copy(&ends)))?;
        is_cached(&source).then_some(taken)
    });
    match warm {
        Some(taken) => none(&taken, &["direct-read", "direct-write"]),
        None => tools::skip("the page cache does not keep 64 MiB here"),
    }
    make_cold(&source);
    let off = [&["--direct=off"], &ends[..]].concat();
    none(&routes(&mut copy(&off)), &["direct-read", "direct-write"]);
    make_cold(&source);
    let on = [&["--direct=on"], &ends[..]].concat();
    some(&routes(&mut copy(&on)), "direct-read");
    assert_same(&source, &target, "all of it past the page cache");
}

/// Reads a file; false where the page cache does not keep all of its data.
fn read_into_cache(path: &Path) -> bool {
    std::fs::read(path).unwrap();
    is_cached(path)
}

/// Whether the page cache has all data of a file.
fn is_cached(path: &Path) -> bool {
    let file = open(path);
    let ranges = image::data_ranges(path).unwrap();
    ranges.iter().all(|range| {
        let len = range.end - range.start;
        file.cached(range.start, len).is_some_and(|cached| cached >= len)
    })
}

fn open(path: &Path) -> blockhaul_io::File {
    blockhaul_io::File::new(std::fs::File::open(path).unwrap().into())
}

#[test]
fn files_of_one_xfs_share_their_data() {
    let Some(xfs) = Mounted::xfs() else { return };
    let source = xfs.file("source.img");
    let target = xfs.file("target.img");
    image::sparse(&source, SIZE, seed()).unwrap();
    let ends = [text(&source), text(&target)];
    let shared = routes(&mut copy(&ends));
    assert_same(&source, &target, "shared");
    let bytes = some(&shared, "reflink");
    none(&shared, &["memory", "direct-write", "file-to-file"]);
    assert_eq!(some(&shared, "not checked for zeroes"), bytes);
    // Onto what is there already, of which nothing must shine through.
    garbage(&target, SIZE).unwrap();
    assert_eq!(some(&routes(&mut copy(&ends)), "reflink"), bytes);
    assert_same(&source, &target, "shared, over garbage");
    // What is shared does not pass through the page cache either.
    garbage(&target, SIZE).unwrap();
    assert_eq!(some(&routes(&mut copy(&["--direct=on", ends[0], ends[1]])), "reflink"), bytes);
    assert_same(&source, &target, "shared, past the page cache");
    // Options that check, allocate or move the bytes take effect.
    for options in [&["-S", "4096"][..], &["--allocated"], &["--no-zero-copy"]] {
        none(&routes(&mut copy(&[options, &ends].concat())), &["reflink"]);
        assert_same(&source, &target, &options.join(" "));
    }
    // Neither a file of another file system nor a part of a block can be shared.
    let other = ScratchDir::on_disk().unwrap();
    let far = other.file("target.img");
    none(&routes(&mut copy(&[text(&source), text(&far)])), &["reflink"]);
    assert_same(&source, &far, "to another file system");
    let crooked = format!("offset?offset=1000&range={}", SIZE - 1000);
    none(&routes(&mut copy(&["--source-layer", &crooked, ends[0], ends[1]])), &["reflink"]);
    assert_eq!(std::fs::metadata(&target).unwrap().len(), SIZE - 1000);
    let bytes = [&source, &target].map(|path| std::fs::read(path).unwrap());
    assert!(bytes[0][1000..] == bytes[1]);
}

/// A file of data that fits no block and no step, long enough for every way to be measured.
fn dense(scratch: &ScratchDir) -> (std::path::PathBuf, u64) {
    let path = scratch.file("dense.img");
    let size = (48 << 20) + 1234;
    let mut bytes = vec![0; size];
    Rng::new(seed()).fill(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    (path, size as u64)
}

#[test]
fn copying_by_the_kernel_is_measured_between_files() {
    for scratch in [ScratchDir::new().unwrap(), ScratchDir::on_disk().unwrap()] {
        let (source, size) = dense(&scratch);
        let target = scratch.file("target.img");
        for options in [&["-S", "0"][..], &["-C", "1"], &[]] {
            garbage(&target, size + 4096).unwrap();
            let what = format!("{options:?}");
            let args = [options, &["--direct=off", text(&source), text(&target)]].concat();
            let taken = routes(&mut copy(&args));
            assert_same(&source, &target, &what);
            // Two measurements of 8 MiB each way, where one lane sees it all; else of a segment at least.
            let alone = options[..].contains(&"-C");
            let copied = some(&taken, "copy-file-range");
            assert!(copied >= if alone { 16 << 20 } else { 7 << 20 }, "{what}: {taken:?}");
            let others =
                ["memory", "file-to-file"].iter().filter_map(|way| taken.get(*way)).sum::<u64>();
            assert!(others >= if alone { 16 << 20 } else { 0 }, "{what}: {taken:?}");
            assert_eq!(others + copied, size, "{what}: {taken:?}");
            assert_eq!(
                options[..].contains(&"0"),
                some(&taken, "not checked for zeroes") == size,
                "{taken:?}"
            );
        }
        // At an offset that fits nothing.
        let crooked = format!("offset?offset=1000&range={}", size - 1003);
        let ends = [text(&source), text(&target)];
        let taken =
            routes(&mut copy(&["--direct=off", "--source-layer", &crooked, ends[0], ends[1]]));
        some(&taken, "copy-file-range");
        let bytes = [&source, &target].map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0][1000..bytes[0].len() - 3] == bytes[1]);
        // Options that check, allocate or move the bytes, or use direct I/O, take effect.
        let others = ["-S=4096", "--allocated", "--no-zero-copy", "--digest=blake3"];
        for option in others {
            let taken = routes(&mut copy(&["--direct=off", option, ends[0], ends[1]]));
            none(&taken, &["copy-file-range"]);
            assert_same(&source, &target, option);
        }
    }
    let scratch = ScratchDir::on_disk().unwrap();
    let (source, _) = dense(&scratch);
    let target = scratch.file("target.img");
    none(&routes(&mut copy(&["--direct=on", text(&source), text(&target)])), &["copy-file-range"]);
    assert_same(&source, &target, "past the page cache");
}

#[test]
fn what_the_kernel_does_not_copy_is_read_and_written() {
    let scratch = ScratchDir::new().unwrap();
    let (source, size) = dense(&scratch);
    let target = scratch.file("target.img");
    let command = copy(&["-S", "0", text(&source), text(&target)]);
    for errno in ["EPERM", "ENOSYS", "EXDEV", "EINVAL", "EIO"] {
        garbage(&target, size).unwrap();
        none(&routes(&mut refusing(errno, "copy_file_range", &command)), &["copy-file-range"]);
        assert_same(&source, &target, errno);
    }
    for errno in ["EINVAL", "EIO"] {
        garbage(&target, size).unwrap();
        // The measurement is in steps of 7.5 MiB and the rest.
        let command = copy(&["-C", "1", text(&source), text(&target)]);
        let taken = routes(&mut refusing(errno, "copy_file_range_short", &command));
        assert!((1..16 << 20).contains(&some(&taken, "copy-file-range")), "{taken:?}");
        assert_same(&source, &target, errno);
    }
    // A full target is reported as such, whichever route writes.
    let Some(small) = Mounted::memory(20 << 20) else { return };
    let from = small.file("source.img");
    let to = small.file("target.img");
    garbage(&from, 12 << 20).unwrap();
    let output = bounded(&mut copy(&["-S", "0", text(&from), text(&to)]), LIMIT);
    let told = lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("No space left"), "{told}");
}

#[test]
fn copying_by_the_kernel_goes_on_when_it_is_interrupted() {
    let scratch = ScratchDir::new().unwrap();
    let (source, size) = dense(&scratch);
    let target = scratch.file("target.img");
    for _ in 0..4 {
        garbage(&target, size).unwrap();
        let command = || copy(&["-S", "0", text(&source), text(&target)]);
        interrupted(command, &[], "by the kernel", |told| {
            assert!(told.contains("copy-file-range"), "{told}");
            assert_same(&source, &target, "interrupted");
            garbage(&target, size).unwrap();
        });
    }
}
