//! The operations of the model ([`ops`]), and the machines that run them ([`device`]).
