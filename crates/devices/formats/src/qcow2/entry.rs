//! L1 and L2 entries: where a guest cluster is ("Cluster mapping", "Extended L2 Entries").

use blockhaul_block::Result;

use super::error::damaged;
use super::header::{Header, incompatible};

/// Offsets in standard entries: bits 9 to 55.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Reserved bits of L1 entries.
const L1_RESERVED: u64 = !(OFFSET | COPIED);
/// Reserved bits of standard L2 entries: 1 to 8 and 56 to 61.
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// The refcount is exactly one.
pub(super) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes, in version 3 without extended entries.
const ZERO: u64 = 1;
/// All subclusters, among the bits for those that are allocated.
pub(super) const ALL_UNITS: u64 = u32::MAX as u64;
/// Compressed data is counted in sectors.
const SECTOR: u64 = 512;
/// Subclusters of a cluster with extended entries.
const SUBCLUSTERS: u32 = 32;

/// Where a run of bytes of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterPlace {
    /// Not in this image: in the backing file, or nowhere.
    Unallocated,
    /// Nowhere: it reads as zeroes. `stored`: space is reserved for it.
    Zero { stored: bool },
    /// In the image file, or the external data file, from this offset on.
    Data(u64),
    /// Compressed with the rest of its cluster, in the image file from this offset on, in at most
    /// `len` bytes.
    Packed { host: u64, len: u32 },
}

/// A run of bytes of the disk in one place.
pub(super) type Run = crate::assembly::DiskRun<ClusterPlace>;

/// Appends a run, joining it to the last one if it continues that.
pub(super) fn push(runs: &mut Vec<Run>, run: Run) {
    if run.len == 0 {
        return;
    }
    if let Some(last) = runs.last_mut() {
        let continues = match (last.place, run.place) {
            (ClusterPlace::Data(one), ClusterPlace::Data(other)) => {
                one.checked_add(last.len) == Some(other)
            }
            (ClusterPlace::Packed { .. }, _) | (_, ClusterPlace::Packed { .. }) => false,
            (one, other) => one == other,
        };
        if continues && last.end() == run.at {
            last.len += run.len;
            return;
        }
    }
    runs.push(run);
}

/// What is behind an L2 entry, for a write. Without subclusters, a cluster counts as all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryContent {
    /// The offset of the cluster that may be written in place, if there is one.
    pub(super) own: Option<u64>,
    /// The subclusters with data, a bit for each.
    pub(super) units: u64,
    /// The subclusters that read as zeroes.
    pub(super) zeroes: u64,
    /// There is data in clusters that must not be written.
    pub(super) elsewhere: bool,
}

/// How an image divides offsets, and what its entries may contain.
#[derive(Debug, Clone, Copy)]
pub(super) struct EntryLayout {
    /// log2 of the cluster size in bytes.
    pub(super) cluster_bits: u32,
    pub(super) extended: bool,
    version: u32,
    pub(super) data_file: bool,
    /// Length of the image file in bytes.
    file_len: u64,
    /// Length in bytes of the file with the guest's data.
    data_len: u64,
}

impl EntryLayout {
    pub(super) fn new(header: &Header, file_len: u64, data_len: u64) -> EntryLayout {
        EntryLayout {
            cluster_bits: header.cluster_bits,
            extended: header.is_extended(),
            version: header.version,
            data_file: header.has(incompatible::DATA_FILE),
            file_len,
            data_len,
        }
    }

    /// The same for files that have become longer.
    pub(super) fn with_lengths(self, file_len: u64, data_len: u64) -> EntryLayout {
        EntryLayout { file_len, data_len, ..self }
    }

    /// Length in bytes of the file with the guest's data.
    pub(super) fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Whether entries can say that a cluster reads as zeroes.
    pub(super) fn has_zero(&self) -> bool {
        self.version >= 3
    }

    /// Cluster size in bytes.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Length of the image file in bytes.
    pub(super) fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Length of an L2 entry in 64-bit words.
    pub(super) fn entry_words(&self) -> u64 {
        if self.extended { 2 } else { 1 }
    }

    /// Number of entries of an L2 table.
    pub(super) fn l2_entries(&self) -> u64 {
        self.cluster() / 8 / self.entry_words()
    }

    /// Bytes of the disk that an L2 table describes: at most 2^39.
    pub(super) fn l2_covers(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// Granularity of allocation in bytes.
    pub(super) fn unit(&self) -> u64 {
        if self.extended { self.cluster() / u64::from(SUBCLUSTERS) } else { self.cluster() }
    }

    /// The offset of the L2 table that an L1 entry names; `None` if all of its clusters are
    /// unallocated.
    ///
    /// # Errors
    /// If it is not a cluster within the image file.
    pub(super) fn l2_table(&self, index: u64, entry: u64) -> Result<Option<u64>> {
        let offset = entry & OFFSET;
        let wrong = |why: &str| Err(damaged(format!("L1 entry {index} ({entry:#x}) {why}")));
        if entry & L1_RESERVED != 0 {
            return wrong("has reserved bits");
        }
        if offset == 0 {
            return Ok(None);
        }
        if !offset.is_multiple_of(self.cluster()) {
            return wrong("names an L2 table that is not at a multiple of the cluster size");
        }
        // Below 2^57: no overflow.
        if offset + self.cluster() > self.file_len {
            return wrong("names an L2 table beyond the end of the file");
        }
        Ok(Some(offset))
    }

    /// What a write to the cluster at `at` of the disk finds in its L2 entry.
    ///
    /// # Errors
    /// If the entry cannot be true.
    pub(super) fn found(&self, words: &[u64], at: u64) -> Result<EntryContent> {
        let &[entry, ref rest @ ..] = words else { return Err(blockhaul_block::Error::misfit()) };
        if entry & COMPRESSED != 0 {
            self.packed(entry, at)?;
            return Ok(EntryContent { own: None, units: 0, zeroes: 0, elsewhere: true });
        }
        let host = self.host(entry, at)?;
        let is_own = entry & COPIED != 0 || self.data_file;
        let (units, zeroes) = match rest.first() {
            Some(&bits) => {
                self.check_units(entry, bits, host, at)?;
                (bits & ALL_UNITS, bits >> SUBCLUSTERS)
            }
            None => match self.standard(entry, at)? {
                ClusterPlace::Data(_) => (ALL_UNITS, 0),
                ClusterPlace::Zero { .. } => (0, ALL_UNITS),
                _ => (0, 0),
            },
        };
        let own = host.filter(|_| is_own);
        Ok(EntryContent { own, units, zeroes, elsewhere: units != 0 && own.is_none() })
    }

    /// The subclusters that a range within a cluster touches; all, if clusters have none.
    pub(super) fn touched(&self, at: u64, end: u64) -> u64 {
        let inside = self.cluster() - 1;
        if !self.extended || at >= end {
            return ALL_UNITS;
        }
        let first = (at & inside) / self.unit();
        let last = ((end - 1) & inside) / self.unit();
        ALL_UNITS >> (31 - (last - first).min(31)) << first & ALL_UNITS
    }

    /// An entry for a cluster with data in these subclusters, and zeroes in those.
    pub(super) fn data_entry(&self, host: u64, units: u64, zeroes: u64) -> [u64; 2] {
        [host | COPIED, (zeroes & !units) << SUBCLUSTERS | units]
    }

    /// An entry for a cluster of zeroes, with or without space for it.
    pub(super) fn zero_entry(&self, host: Option<u64>) -> [u64; 2] {
        let place = host.map_or(0, |host| host | COPIED);
        if self.extended { [place, ALL_UNITS << SUBCLUSTERS] } else { [place | ZERO, 0] }
    }

    /// An entry for a cluster that is compressed to `len` bytes at `host`, at least one; none if its
    /// offset is too large.
    pub(super) fn packed_entry(&self, host: u64, len: u64) -> Option<[u64; 2]> {
        let x = 62 - (self.cluster_bits - 8);
        let last = host.checked_add(len)?.checked_sub(1)?;
        let more = last / SECTOR - host / SECTOR;
        (last >> x == 0).then_some([COMPRESSED | more << x | host, 0])
    }

    pub(super) fn is_compressed(entry: u64) -> bool {
        entry & COMPRESSED != 0
    }

    /// The clusters of the image file that an entry refers to: the first, and how many.
    pub(super) fn refers_to(&self, entry: u64) -> Option<(u64, u64)> {
        if self.data_file {
            return None;
        }
        if entry & COMPRESSED != 0 {
            let x = 62 - (self.cluster_bits - 8);
            let host = entry & ((1 << x) - 1);
            let sectors = ((entry & (COMPRESSED - 1)) >> x) + 1;
            let end = (host / SECTOR + sectors) * SECTOR;
            let first = host >> self.cluster_bits;
            return Some((first, ((end - 1) >> self.cluster_bits) - first + 1));
        }
        let offset = entry & OFFSET;
        (offset != 0).then_some((offset >> self.cluster_bits, 1))
    }

    /// Appends the runs of a part of one guest cluster: `at..end`, at least one byte. `words` is
    /// its L2 entry.
    ///
    /// # Errors
    /// If the entry cannot be true.
    pub(super) fn runs(&self, words: &[u64], at: u64, end: u64, runs: &mut Vec<Run>) -> Result<()> {
        let &[entry, ref rest @ ..] = words else { return Ok(()) };
        let place = match (entry & COMPRESSED != 0, rest.first()) {
            (true, _) => self.packed(entry, at)?,
            (false, Some(&bits)) => return self.subclusters(entry, bits, at, end, runs),
            (false, None) => self.standard(entry, at)?,
        };
        push(runs, Run { at, len: end - at, place });
        Ok(())
    }

    fn wrong(&self, entry: u64, at: u64, why: &str) -> blockhaul_block::Error {
        let guest = at >> self.cluster_bits << self.cluster_bits;
        damaged(format!(
            "the L2 entry of the cluster at offset {guest} of the disk ({entry:#x}) {why}"
        ))
    }

    /// The place of a byte in a cluster with a standard descriptor.
    fn standard(&self, entry: u64, at: u64) -> Result<ClusterPlace> {
        let host = self.host(entry, at)?;
        if entry & ZERO != 0 {
            // "With version 2 ... this is always 0."
            if self.version < 3 {
                return Err(self.wrong(
                    entry,
                    at,
                    "has a zero flag, which version 2 does not have",
                ));
            }
            return Ok(ClusterPlace::Zero { stored: host.is_some() });
        }
        match host {
            None => Ok(ClusterPlace::Unallocated),
            Some(host) => Ok(ClusterPlace::Data(self.inside(entry, host, at)?)),
        }
    }

    /// The cluster of the file that an entry has, whatever it reads as; none if it is compressed.
    ///
    /// # Errors
    /// If the entry cannot be true.
    pub(super) fn space(&self, entry: u64, at: u64) -> Result<Option<u64>> {
        if EntryLayout::is_compressed(entry) { Ok(None) } else { self.host(entry, at) }
    }

    /// The host cluster of an entry, if it has one.
    fn host(&self, entry: u64, at: u64) -> Result<Option<u64>> {
        let offset = entry & OFFSET;
        if entry & L2_RESERVED != 0 {
            return Err(self.wrong(entry, at, "has reserved bits"));
        }
        if !offset.is_multiple_of(self.cluster()) {
            return Err(self.wrong(
                entry,
                at,
                "has an offset that is no multiple of the cluster size",
            ));
        }
        // In an external data file, a cluster at offset 0 is marked by bit 63.
        let first = self.data_file && entry & COPIED != 0;
        Ok((offset != 0 || first).then_some(offset))
    }

    /// The offset of a byte within a host cluster that begins inside the file. Its end may be
    /// missing: the last cluster of a file need not be complete.
    fn inside(&self, entry: u64, host: u64, at: u64) -> Result<u64> {
        if host >= self.data_len {
            return Err(self.wrong(entry, at, "names a cluster beyond the end of the file"));
        }
        Ok(host + (at & (self.cluster() - 1)))
    }

    /// The place of a compressed cluster.
    fn packed(&self, entry: u64, at: u64) -> Result<ClusterPlace> {
        if self.data_file {
            return Err(self.wrong(
                entry,
                at,
                "is compressed, in an image with an external data file",
            ));
        }
        // x in "Compressed Clusters Descriptor": at most 61.
        let x = 62 - (self.cluster_bits - 8);
        let host = entry & ((1 << x) - 1);
        let more = (entry & (COMPRESSED - 1)) >> x;
        if host >= self.file_len {
            return Err(self.wrong(entry, at, "names compressed data beyond the end of the file"));
        }
        // At most 2^13 further sectors; the file may end within the last one.
        let len = ((more + 1) * SECTOR - host % SECTOR).min(self.file_len - host);
        let len = u32::try_from(len).map_err(|_| self.wrong(entry, at, "is too long"))?;
        Ok(ClusterPlace::Packed { host, len })
    }

    fn check_units(&self, entry: u64, bits: u64, host: Option<u64>, at: u64) -> Result<()> {
        let allocated = bits & ALL_UNITS;
        let zero = bits >> SUBCLUSTERS;
        if entry & ZERO != 0 {
            return Err(self.wrong(entry, at, "has reserved bits"));
        }
        if allocated & zero != 0 {
            return Err(self.wrong(entry, at, "has subclusters that are both allocated and zero"));
        }
        if allocated != 0 && host.is_none() {
            return Err(self.wrong(entry, at, "has subclusters without a cluster"));
        }
        Ok(())
    }

    /// Appends the runs of a cluster with an extended entry.
    fn subclusters(
        &self,
        entry: u64,
        bits: u64,
        at: u64,
        end: u64,
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        let host = self.host(entry, at)?;
        let allocated = bits & ALL_UNITS;
        let zero = bits >> SUBCLUSTERS;
        self.check_units(entry, bits, host, at)?;
        let data = match (host, allocated) {
            (Some(host), 1..) => Some(self.inside(entry, host, at)? - (at & (self.cluster() - 1))),
            _ => None,
        };
        let start = at & !(self.cluster() - 1);
        let unit = self.unit();
        let mut next = at;
        while next < end {
            let number = (next - start) / unit;
            let until = (start + (number + 1) * unit).min(end);
            let place = match data {
                Some(host) if allocated >> number & 1 != 0 => {
                    ClusterPlace::Data(host + (next - start))
                }
                _ if zero >> number & 1 != 0 => ClusterPlace::Zero { stored: host.is_some() },
                _ => ClusterPlace::Unallocated,
            };
            push(runs, Run { at: next, len: until - next, place });
            next = until;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(cluster_bits: u32, extended: bool) -> EntryLayout {
        let file_len = 1 << 40;
        let version = 3;
        EntryLayout {
            cluster_bits,
            extended,
            version,
            data_file: false,
            file_len,
            data_len: file_len,
        }
    }

    fn one(layout: EntryLayout, words: &[u64], at: u64, end: u64) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        layout.runs(words, at, end, &mut runs).map(|()| runs)
    }

    #[test]
    fn a_standard_entry_is_data_zero_or_nothing() {
        let at = (5 << 16) + 10;
        let place = |entry| one(layout(16, false), &[entry], at, at + 20).map(|runs| runs[0].place);
        assert_eq!(place(0).unwrap(), ClusterPlace::Unallocated);
        assert_eq!(place(1).unwrap(), ClusterPlace::Zero { stored: false });
        assert_eq!(place(0x10001).unwrap(), ClusterPlace::Zero { stored: true });
        assert_eq!(place(COPIED | 0x30000).unwrap(), ClusterPlace::Data(0x3000a));
        for bad in [2, 0x200, 1 << 56, 1 << 40, COPIED | 1 << 55] {
            assert!(place(bad).is_err(), "{bad:#x}");
        }
        let old = EntryLayout { version: 2, ..layout(16, false) };
        assert!(one(old, &[1], 0, 1).is_err());
    }

    #[test]
    fn the_sectors_of_a_compressed_cluster_are_counted_from_its_first() {
        // x = 54 with clusters of 64 KiB.
        let entry = COMPRESSED | 3 << 54 | 0x1_2345;
        let runs = one(layout(16, false), &[entry], 0, 1 << 16).unwrap();
        let len = 4 * 512 - 0x145;
        assert_eq!(
            runs,
            [Run { at: 0, len: 1 << 16, place: ClusterPlace::Packed { host: 0x1_2345, len } }]
        );
        let short = EntryLayout { file_len: 0x1_2400, ..layout(16, false) };
        let runs = one(short, &[entry], 0, 1).unwrap();
        assert_eq!(runs[0].place, ClusterPlace::Packed { host: 0x1_2345, len: 0xbb });
        let shorter = EntryLayout { file_len: 0x1_2345, ..short };
        assert!(one(shorter, &[entry], 0, 1).is_err());
    }

    #[test]
    fn entries_of_compressed_clusters_cover_all_sectors_of_their_data() {
        for bits in [9, 12, 16, 21] {
            let layout = EntryLayout { file_len: 1 << 50, ..layout(bits, false) };
            let cluster = 1_u64 << bits;
            let limit = 1 << (62 - (bits - 8));
            for host in [cluster, cluster + 1, cluster * 3 - 1, cluster * 2 + 511, cluster + 512] {
                for len in [1, 100, 510, cluster - 1] {
                    let entry = layout.packed_entry(host, len).unwrap();
                    let ClusterPlace::Packed { host: found, len: most } =
                        layout.packed(entry[0], 0).unwrap()
                    else {
                        panic!("{entry:x?}");
                    };
                    let most = u64::from(most);
                    assert!(found == host && most >= len && most < len + SECTOR, "{host} {len}");
                    assert!((host + most).is_multiple_of(SECTOR));
                    let first = host >> bits;
                    let count = ((host + len - 1) >> bits) - first + 1;
                    assert_eq!(layout.refers_to(entry[0]), Some((first, count)));
                }
            }
            assert!(layout.packed_entry(limit - 2, 2).is_some());
            assert_eq!(layout.packed_entry(limit - 2, 3), None);
        }
    }

    #[test]
    fn subclusters_are_joined_where_they_are_alike() {
        let layout = layout(16, true);
        let data = 0b1110_u64;
        let zero = 0b1_0000_u64;
        let runs = one(layout, &[0x20000, zero << 32 | data], 1024, 1 << 16).unwrap();
        let unit = 2048;
        assert_eq!(
            runs,
            [
                Run { at: 1024, len: 1024, place: ClusterPlace::Unallocated },
                Run { at: unit, len: 3 * unit, place: ClusterPlace::Data(0x20000 + unit) },
                Run { at: 4 * unit, len: unit, place: ClusterPlace::Zero { stored: true } },
                Run { at: 5 * unit, len: 27 * unit, place: ClusterPlace::Unallocated },
            ]
        );
        for (entry, bits) in [(0x20000, 1 << 32 | 1), (0, 1), (1, 0), (0x20001, 1)] {
            assert!(one(layout, &[entry, bits], 0, 1).is_err(), "{entry:#x} {bits:#x}");
        }
    }

    #[test]
    fn an_l1_entry_names_a_cluster_of_the_file() {
        let layout = layout(16, false);
        assert_eq!(layout.l2_table(0, 0).unwrap(), None);
        assert_eq!(layout.l2_table(0, COPIED | 0x30000).unwrap(), Some(0x30000));
        for bad in [1, 0x200, 1 << 40, (1 << 40) - 0x8000, 1 << 56, 1 << 62] {
            assert!(layout.l2_table(7, bad).unwrap_err().to_string().contains("L1 entry 7"));
        }
    }
}
