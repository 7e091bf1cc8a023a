//! A JSON value as a deserializer whose errors name the member that is wrong.
//!
//! serde_json's own errors do not, and a derived enum with an internal tag deserializes from a copy of the
//! members that has lost their names.

use std::fmt;

use serde::de::value::StringDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

/// The name and the members of a request.
pub struct RequestMembers {
    pub name: String,
    pub members: Map<String, Value>,
}

/// Why a member was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberError {
    /// Names of the member and of those that it is in, as in `with[0].target`; empty: the command itself.
    pub member: String,
    /// The rest of a sentence that begins with the member.
    pub text: String,
}

impl MemberError {
    /// The same problem, of a member of `outer`.
    fn within(mut self, outer: &str) -> MemberError {
        let dot = if self.member.is_empty() || self.member.starts_with('[') { "" } else { "." };
        self.member = format!("{outer}{dot}{}", self.member);
        self
    }
}

impl fmt::Display for MemberError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.member, self.text)
    }
}

impl std::error::Error for MemberError {}

impl de::Error for MemberError {
    fn custom<T: fmt::Display>(text: T) -> MemberError {
        MemberError { member: String::new(), text: text.to_string() }
    }

    fn missing_field(name: &'static str) -> MemberError {
        MemberError { member: name.to_string(), text: "is missing".to_string() }
    }

    fn unknown_field(name: &str, known: &'static [&'static str]) -> MemberError {
        let text = match known {
            [] => "is unknown; the command has no members".to_string(),
            known => format!("is unknown; known are {}", known.join(", ")),
        };
        MemberError { member: name.to_string(), text }
    }
}

impl<'de> Deserializer<'de> for RequestMembers {
    type Error = MemberError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        visitor.visit_enum(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, MemberError> {
        if variants.contains(&&*self.name) {
            return visitor.visit_enum(self);
        }
        let known = variants.join(", ");
        Err(MemberError::custom(format!("unknown command {:?}; known are {known}", self.name)))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl<'de> de::EnumAccess<'de> for RequestMembers {
    type Error = MemberError;
    type Variant = MemberValue;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, MemberValue), MemberError> {
        let variant: StringDeserializer<MemberError> = self.name.into_deserializer();
        Ok((seed.deserialize(variant)?, MemberValue(Value::Object(self.members))))
    }
}

/// The value of a member.
pub struct MemberValue(Value);

/// The members of a request.
impl<'de> de::VariantAccess<'de> for MemberValue {
    type Error = MemberError;

    fn unit_variant(self) -> Result<(), MemberError> {
        match self.0.as_object().and_then(|members| members.keys().next()) {
            None => Ok(()),
            Some(name) => Err(MemberError::unknown_field(name, &[])),
        }
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<S::Value, MemberError> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, MemberError> {
        self.deserialize_seq(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, MemberError> {
        self.deserialize_map(visitor)
    }
}

impl<'de> Deserializer<'de> for MemberValue {
    type Error = MemberError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        self.0.deserialize_any(visitor).map_err(MemberError::custom)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let value = self.0.as_bool();
        visitor.visit_bool(value.ok_or_else(|| MemberError::custom("is not true or false"))?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let value = self.0.as_u64();
        visitor.visit_u64(value.ok_or_else(|| MemberError::custom("is not an unsigned integer"))?)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let value = self.0.as_f64();
        visitor.visit_f64(value.ok_or_else(|| MemberError::custom("is not a number"))?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let Value::String(text) = self.0 else {
            return Err(MemberError::custom("is not a string"));
        };
        visitor.visit_string(text)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let Value::Array(values) = self.0 else { return Err(MemberError::custom("is not a list")) };
        visitor.visit_seq(Elements { left: values.into_iter(), index: 0 })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, MemberError> {
        let Value::Object(members) = self.0 else {
            return Err(MemberError::custom("is not an object"));
        };
        visitor.visit_map(Members { left: members.into_iter(), value: None })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, MemberError> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, MemberError> {
        match self.0 {
            Value::String(name) if variants.contains(&&*name) => {
                visitor.visit_enum(IntoDeserializer::<MemberError>::into_deserializer(name))
            }
            _ => Err(MemberError::custom(format!("is not one of {}", variants.join(", ")))),
        }
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 char str bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct identifier ignored_any
    }
}

/// The members of an object that are left.
struct Members {
    left: serde_json::map::IntoIter,
    /// The value of the latest name.
    value: Option<(String, Value)>,
}

impl<'de> de::MapAccess<'de> for Members {
    type Error = MemberError;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, MemberError> {
        self.value = self.left.next();
        let Some((name, _)) = &self.value else { return Ok(None) };
        let name: StringDeserializer<MemberError> = name.clone().into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<S::Value, MemberError> {
        let (name, value) = self.value.take().unwrap_or_default();
        seed.deserialize(MemberValue(value)).map_err(|problem| problem.within(&name))
    }
}

/// The elements of a list that are left.
struct Elements {
    left: std::vec::IntoIter<Value>,
    index: usize,
}

impl<'de> de::SeqAccess<'de> for Elements {
    type Error = MemberError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, MemberError> {
        let Some(value) = self.left.next() else { return Ok(None) };
        let index = self.index;
        self.index += 1;
        let element = seed.deserialize(MemberValue(value));
        element.map(Some).map_err(|problem| problem.within(&format!("[{index}]")))
    }
}
