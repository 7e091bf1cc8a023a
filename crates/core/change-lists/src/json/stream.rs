//! Values in JSON, read without keeping them.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::list::{ListReader, Place};
use super::object::{Member, Object, shortened};

/// Names of members that are read. `serde_json` alone keeps the last of two members of one name.
const KNOWN: [&str; 25] = [
    "offset",
    "length",
    "start",
    "description",
    "startOffset",
    "changedArea",
    "dynamicProperty",
    "dynamicType",
    "byte_offset",
    "byteOffset",
    "size_bytes",
    "sizeBytes",
    "block_metadata",
    "blockMetadata",
    "volume_capacity_bytes",
    "volumeCapacityBytes",
    "block_metadata_type",
    "blockMetadataType",
    "Blocks",
    "ChangedBlocks",
    "BlockIndex",
    "BlockSize",
    "VolumeSize",
    "NextToken",
    "ExpiryTime",
];

/// A value in a list.
pub(super) struct ValueSeed<'a> {
    pub(super) list: &'a mut ListReader,
    pub(super) place: Place,
}

/// Fails with a reason that [`ListReader`] keeps: the error of `serde_json` adds the line.
fn fail<T, E: Error>(list: &mut ListReader, why: String) -> Result<T, E> {
    list.set_fault(why);
    Err(E::custom("see the fault"))
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl ValueSeed<'_> {
    fn no_range<E: Error>(self, value: &str) -> Result<(), E> {
        let why = format!("not a range with offset and length: {}", shortened(value));
        fail(self.list, why)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a range or a list of ranges")
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.no_range("null")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.no_range(&value.to_string())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.no_range(&value.to_string())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.no_range(&value.to_string())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.no_range(&value.to_string())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        self.no_range(&format!("\"{value}\""))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        if self.place != Place::Value {
            return self.no_range("[...]");
        }
        while entries.next_element_seed(ValueSeed { list: self.list, place: self.place })?.is_some()
        {
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let ValueSeed { list, place } = self;
        let mut object = Object::default();
        while let Some(name) = members.next_key_seed(NameSeed)? {
            let name = match name {
                Name::Known(name) => name,
                Name::Other(name) => {
                    if let Err(why) = object.check_new(&name) {
                        return fail(list, why);
                    }
                    members.next_value::<IgnoredAny>()?;
                    if let Err(why) = object.add_other(name) {
                        return fail(list, why);
                    }
                    continue;
                }
            };
            if let Err(why) = object.check_new(name) {
                return fail(list, why);
            }
            let entries = if place == Place::Value { Place::of_list(name) } else { None };
            let member = members.next_value_seed(MemberSeed { list: &mut *list, entries })?;
            if let Err(why) = object.add(name, member) {
                return fail(list, why);
            }
        }
        match list.object(place, &object) {
            Ok(()) => Ok(()),
            Err(why) => fail(list, why),
        }
    }
}

/// The name of a member.
enum Name {
    Known(&'static str),
    Other(String),
}

struct NameSeed;

impl<'de> DeserializeSeed<'de> for NameSeed {
    type Value = Name;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Name, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NameSeed {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a member")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
        let known = KNOWN.iter().find(|known| **known == name);
        Ok(known.map_or_else(|| Name::Other(name.into()), |known| Name::Known(known)))
    }
}

/// The value of a member: the entries of a list are read as `entries`.
struct MemberSeed<'a> {
    list: &'a mut ListReader,
    entries: Option<Place>,
}

impl<'de> DeserializeSeed<'de> for MemberSeed<'_> {
    type Value = Member;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Member, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MemberSeed<'_> {
    type Value = Member;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the value of a member")
    }

    fn visit_unit<E>(self) -> Result<Member, E> {
        Ok(Member::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Member, E> {
        Ok(Member::Other(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Member, E> {
        Ok(Member::Number(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Member, E> {
        Ok(Member::Other(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Member, E> {
        Ok(Member::Other(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Member, E> {
        Ok(Member::Text(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Member, A::Error> {
        let Some(place) = self.entries else {
            while access.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Member::Other("[...]".into()));
        };
        while access.next_element_seed(ValueSeed { list: self.list, place })?.is_some() {}
        Ok(Member::List)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Member, A::Error> {
        while access.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Member::Other("{...}".into()))
    }
}
