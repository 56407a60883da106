# What an install prefix holds: lib/, include/, share/cmake/AllFinite, and for Python the module beside them.
include(CMakePackageConfigHelpers)

set(config_dir share/cmake/AllFinite)
install(TARGETS allfinite EXPORT AllFiniteTargets LIBRARY DESTINATION lib)
install(DIRECTORY csrc/include/allfinite DESTINATION include)
install(EXPORT AllFiniteTargets NAMESPACE AllFinite:: DESTINATION ${config_dir})
configure_package_config_file(cmake/AllFiniteConfig.cmake.in AllFiniteConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(AllFiniteConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/AllFiniteConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/AllFiniteConfigVersion.cmake" cmake/FindTorchLibs.cmake
        DESTINATION ${config_dir})

if(ALLFINITE_PYTHON)
  configure_file(cmake/build_info.py.in _build_info.py @ONLY)
  install(TARGETS _C LIBRARY DESTINATION .)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/_build_info.py" DESTINATION .)
endif()
